// SPDX-License-Identifier: Apache-2.0
// The report, what of it is shown, and the look of each strategy.

import { svg } from "./dom.js";

export const loaded = { report: null };
export const shown = { axis: "t", metric: null, off: new Set(), condition: null, run: 0 };

export const AXES = { t: "time", samples: "samples", bytes: "bytes" };

export async function unpack() {
  const packed = atob(document.getElementById("report").textContent.trim());
  const binary = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) binary[i] = packed.charCodeAt(i);
  const plain = new Blob([binary]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
}

export function axisLabel(axis = shown.axis) {
  if (axis === "t") return loaded.report.virtual ? "virtual seconds" : "seconds";
  return axis === "samples" ? "samples, of all workers" : "bytes sent and received by a worker";
}

// Runs of strategies that are not switched off, under the condition that is looked at.
export function runs({ anyCondition = false } = {}) {
  return loaded.report.runs.filter(
    (run) => !shown.off.has(run.strategy) && (anyCondition || run.condition === shown.condition),
  );
}

export function byStrategy(some) {
  return Map.groupBy ? Map.groupBy(some, (run) => run.strategy) : d3.group(some, (run) => run.strategy);
}

export function lookOf(strategy) {
  return loaded.report.strategies.find((s) => s.name === strategy);
}

export function colourOf(strategy) {
  return `var(--c-${lookOf(strategy).colour})`;
}

export function colours() {
  const names = loaded.report.strategies.map((s) => s.name);
  return { domain: names, range: names.map(colourOf) };
}

export function symbols() {
  return {
    domain: loaded.report.strategies.map((s) => s.name),
    range: loaded.report.strategies.map((s) => SHAPES[s.marker]),
  };
}

// Symbols of d3, and a triangle on its tip.
const SHAPES = {
  circle: d3.symbolCircle,
  square: d3.symbolSquare,
  triangle: d3.symbolTriangle,
  diamond: d3.symbolDiamond,
  star: d3.symbolStar,
  cross: d3.symbolCross,
  wye: d3.symbolWye,
  nabla: {
    draw(context, size) {
      const y = -Math.sqrt(size / (Math.sqrt(3) * 3));
      context.moveTo(0, -y * 2);
      context.lineTo(-Math.sqrt(3) * y, y);
      context.lineTo(Math.sqrt(3) * y, y);
      context.closePath();
    },
  },
};

export function shape(strategy, area = 60) {
  return svg("path", { d: d3.symbol(SHAPES[lookOf(strategy).marker], area)(), fill: colourOf(strategy) });
}

export function swatch(strategy) {
  const picture = svg("svg", { width: 22, height: 14, viewBox: "-11 -7 22 14", "aria-hidden": "true" });
  picture.append(svg("path", { d: "M-11,0H11", stroke: colourOf(strategy), "stroke-width": 2 }), shape(strategy));
  return picture;
}

export function nameOf(run, node) {
  return node < run.workers ? `worker ${node}` : `server ${node - run.workers}`;
}

// A strategy in fewer letters, where that still says which: ps(consistency=asp) is ps(asp).
export function brief(strategy, most = 18) {
  const short = (name) => name.replace(/\w+=/g, "");
  const alike = loaded.report.strategies.filter((s) => short(s.name) === short(strategy)).length > 1;
  const text = strategy.length <= most || alike ? strategy : short(strategy);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
