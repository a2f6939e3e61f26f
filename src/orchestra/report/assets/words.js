// SPDX-License-Identifier: Apache-2.0
// What the first page says in words: who won, how far to trust that, why, and what was the same for all.

import { el, grid } from "./dom.js";
import { count } from "./format.js";
import { swatch } from "./state.js";

const list = (attributes, texts) => el("ul", attributes, ...texts.map((text) => el("li", {}, text)));

export function learned(story) {
  const doubts = [...story.verdict.doubts, ...warnings(story)];
  return [
    el("p", { class: "verdict", id: "verdict" }, story.verdict.sentence),
    doubts.length ? list({ class: "doubts" }, doubts) : null,
    story.why.length ? el("div", { class: "why" }, el("h2", {}, "Why"), list({}, story.why)) : null,
  ];
}

function warnings(story) {
  const found = story.runs.flatMap((run) => [
    ...(run.missing ? [`${run.name}: ${run.missing}.`] : []),
    ...(run.failed ? [`${run.name} failed: ${run.failed}`] : []),
    ...(run.over || run.failed ? [] : [`${run.name} ${run.fate ? `${run.fate}: figures until then` : "has not ended: figures so far"}.`]),
    ...run.warnings.map((text) => `${run.name}: ${text}`),
    ...(run.skipped ? [`${run.name}: ${count(run.skipped, "gradient")} not finite, not used.`] : []),
  ]);
  const refused = story.refused.map((r) => `${r.name} is not in this report: ${r.why}.`);
  return found.length > 8
    ? [...found.slice(0, 8), `… and ${found.length - 8} more.`, ...refused]
    : [...found, ...refused];
}

export function results(story) {
  const column = story.table.head.indexOf("strategy");
  const lines = story.table.lines.map((line) =>
    line.map((text, i) => (i === column ? el("span", {}, swatch(text), text) : text)),
  );
  return el(
    "div",
    {},
    el("h2", {}, "Results"),
    grid(story.table.head, lines, { left: column + 1, label: "Results" }),
    el("p", { class: "note" }, story.legend),
  );
}

export function fairness(story) {
  if (!story.fairness.length) return null;
  return el("aside", { class: "box", "aria-label": "Fairness" }, el("h2", {}, "Fairness"), list({}, story.fairness));
}
