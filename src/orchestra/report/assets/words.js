// SPDX-License-Identifier: Apache-2.0
// What the first page says in words: who won, how far to trust that, why, and what was the same for all.

import { el, grid } from "./dom.js";
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

function warnings({ happened, refused }) {
  const more = happened.length > 8 ? [`… and ${happened.length - 8} more.`] : [];
  return [...happened.slice(0, 8), ...more, ...refused.map((r) => `${r.name} is not in this report: ${r.why}.`)];
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
