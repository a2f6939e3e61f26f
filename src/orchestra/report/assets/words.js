// SPDX-License-Identifier: Apache-2.0
// The words of the first page: the verdict, its caveats, the reasons, and what was the same for all.

import { el, grid } from "./dom.js";
import { swatch } from "./state.js";

const list = (attributes, texts) => el("ul", attributes, ...texts.map((text) => el("li", {}, text)));

export function learned(report) {
  const doubts = [...report.verdict.doubts, ...warnings(report)];
  return [
    el("p", { class: "verdict", id: "verdict" }, report.verdict.sentence),
    doubts.length ? list({ class: "doubts" }, doubts) : null,
    report.why.length ? el("div", { class: "why" }, el("h2", {}, "Why"), list({}, report.why)) : null,
  ];
}

function warnings({ happened, refused }) {
  const more = happened.length > 8 ? [`… and ${happened.length - 8} more.`] : [];
  return [...happened.slice(0, 8), ...more, ...refused.map((r) => `${r.name} is not in this report: ${r.why}.`)];
}

export function results(report) {
  const column = report.table.head.indexOf("strategy");
  const lines = report.table.lines.map((line) =>
    line.map((text, i) => (i === column ? el("span", {}, swatch(text), text) : text)),
  );
  return el(
    "div",
    {},
    el("h2", {}, "Results"),
    grid(report.table.head, lines, { left: column + 1, label: "Results" }),
    el("p", { class: "note" }, report.legend),
  );
}

export function fairness(report) {
  if (!report.fairness.length) return null;
  return el("aside", { class: "box", "aria-label": "Fairness" }, el("h2", {}, "Fairness"), list({}, report.fairness));
}
