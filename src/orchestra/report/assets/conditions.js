// SPDX-License-Identifier: Apache-2.0
// The fastest strategy under each condition, and throughput by number of workers.

import { figure } from "./dom.js";
import { mean, median, number, percent, seconds } from "./format.js";
import { roundTicks } from "./curves.js";
import { brief, colours, runs, shown, symbols, loaded } from "./state.js";

const INK = "#1b1f24"; // cells are light in both themes

// Seconds to the target, or of the whole run without one. Strategies that are switched off still count for the first place.
function cells() {
  const groups = d3.group(
    loaded.report.runs,
    (run) => run.condition,
    (run) => run.strategy,
  );
  const found = [];
  for (const [condition, members] of groups) {
    const column = [...members].map(([strategy, own]) => {
      const times = own.map((run) => (loaded.report.target ? run.reached : run.seconds)).filter((t) => t != null);
      return {
        condition,
        strategy,
        time: times.length === own.length ? median(times) : null,
        hit: times.length,
        of: own.length,
      };
    });
    const best = d3.min(column, (c) => c.time);
    const first = loaded.report.firsts[condition] ?? [];
    for (const cell of column)
      Object.assign(cell, {
        ratio: cell.time == null ? null : cell.time / best,
        first: !first.includes(cell.strategy) ? null : first.length === 1 ? "first" : "tie",
      });
    found.push(...column);
  }
  return found.filter((c) => !shown.off.has(c.strategy));
}

export function heat() {
  const order = () => loaded.report.conditions.filter((condition) => cells().some((c) => c.condition === condition));
  const rank = () =>
    d3
      .sort(
        d3.groups(cells(), (c) => c.strategy),
        ([, own]) => mean(own.map((c) => Math.log(c.ratio ?? 1e3))),
      )
      .map(([strategy]) => strategy);
  const draw = (width) => {
    const all = cells();
    const [columns, lines] = [order(), rank()];
    if (columns.length < 2) return null;
    // On a narrow screen conditions run down and strategies across.
    const across = width / columns.length > 105;
    const [x, y] = across ? ["condition", "strategy"] : ["strategy", "condition"];
    const split = (text) => text.split(" · ").join("\n");
    const side = (text) => (across ? brief(text, 24) : split(text));
    const longest = d3.max(across ? lines : columns, (text) => d3.max(side(text).split("\n"), (part) => part.length));
    const deep = d3.max(columns, (text) => text.split(" · ").length);
    const top = across ? 14 + 15 * deep : 84;
    return Plot.plot({
      width,
      height: top + 10 + (across ? 46 : Math.max(34, 18 * deep)) * (across ? lines : columns).length,
      marginLeft: 16 + 6.7 * longest,
      marginTop: top,
      marginRight: across ? 4 : 44,
      marginBottom: 6,
      x: {
        domain: across ? columns : lines,
        padding: 0.03,
        axis: "top",
        label: null,
        tickSize: 0,
        tickFormat: across ? split : (s) => brief(s, 14),
        tickRotate: across ? 0 : -45,
        lineHeight: 1.2,
      },
      y: { domain: across ? lines : columns, padding: 0.06, label: null, tickSize: 0, tickFormat: side },
      color: {
        type: "log",
        domain: [1, Math.max(2, d3.max(all, (c) => c.ratio) ?? 2)],
        range: ["#e6f1f9", "#e8955a"],
        interpolate: "lab",
        unknown: "var(--raised)",
      },
      marks: [
        Plot.cell(all, {
          x,
          y,
          fill: (c) => c.ratio,
          rx: 3,
          title: (c) =>
            `${c.strategy}, ${c.condition}: ${c.time == null ? "not always reached" : `${seconds(c.time)}, ${number(c.ratio)} times the best`}`,
        }),
        Plot.cell(
          all.filter((c) => c.first),
          { x, y, fill: "none", stroke: INK, strokeWidth: 3, inset: 3, rx: 2 },
        ),
        Plot.text(
          all.filter((c) => c.time == null),
          { x, y, text: (c) => `${c.hit}/${c.of}`, fill: "var(--soft)" },
        ),
        Plot.text(
          all.filter((c) => c.time != null),
          {
            x,
            y,
            text: (c) => (across ? seconds(c.time) : number(c.time)),
            fill: INK,
            fontWeight: (c) => (c.first ? 700 : 400),
            dy: across ? -7 : 0,
            fontSize: across ? 13 : 11,
          },
        ),
        across
          ? Plot.text(
              all.filter((c) => c.ratio != null),
              {
                x,
                y,
                text: (c) => c.first ?? `${c.ratio.toFixed(2)}×`,
                fill: "#3b4148",
                dy: 9,
                fontSize: 11,
              },
            )
          : null,
      ],
    });
  };
  const rows = () => [
    ["strategy", "condition", "median time", "times the best", "first"],
    cells().map((c) => [
      c.strategy,
      c.condition,
      c.time == null ? `reached in ${c.hit} of ${c.of}` : seconds(c.time),
      number(c.ratio),
      c.first ?? "",
    ]),
  ];
  const what = loaded.report.target ? `Median seconds to ${loaded.report.target.text}` : "Median seconds of a run";
  return figure(
    "The first strategy under each condition",
    `${what}; the first of each condition is boxed, several where they are tied; the others are multiples of its seconds. A fraction: the target was not reached in every run.`,
    draw,
    rows,
    "There is only one condition: see orchestra sweep.",
  );
}

// Samples a second against nodes. The ideal line scales the best rate per node at the fewest nodes.
// What is left of a condition when only the number of workers may differ.
const beside = (condition) =>
  condition
    .split(" · ")
    .filter((part) => !part.startsWith("workers "))
    .join(" · ");

function scales() {
  const alike = (run) => beside(run.condition) === beside(shown.condition ?? run.condition);
  const found = d3
    .groups(runs({ anyCondition: true }).filter(alike), (run) => run.strategy)
    .flatMap(([strategy, own]) => {
      const points = d3
        .groups(own, (run) => run.workers + run.servers)
        .map(([nodes, members]) => ({
          strategy,
          nodes,
          workers: members[0].workers,
          speed: mean(members.map((run) => run.samples_per_second)),
        }));
      return points.length > 1 ? points.sort((a, b) => a.nodes - b.nodes) : [];
    });
  const fewest = d3.min(found, (p) => p.nodes);
  const each = d3.max(
    found.filter((p) => p.nodes === fewest),
    (p) => p.speed / p.nodes,
  );
  for (const p of found) Object.assign(p, { ideal: each * p.nodes, efficiency: p.speed / (each * p.nodes) });
  return found;
}

export const scaled = () => scales().length > 0;

// Ticks without those that would touch others.
function nodeTicks(all) {
  const kept = [];
  for (const n of d3.sort(new Set(all.map((p) => p.nodes)))) if (!kept.length || n / kept.at(-1) > 1.2) kept.push(n);
  return kept;
}

const nodesAxis = (all) => ({
  type: "log",
  base: 2,
  label: "nodes, servers counted →",
  labelAnchor: "right",
  labelArrow: "none",
  ticks: nodeTicks(all),
  tickFormat: (x) => `${x}`,
});

export function scaling() {
  const draw = (width) => {
    const all = scales();
    if (!all.length) return null;
    const ideal = d3
      .sort(
        d3.rollup(
          all,
          (v) => v[0].ideal,
          (p) => p.nodes,
        ),
        ([n]) => n,
      )
      .map(([n, y]) => ({ n, y }));
    return Plot.plot({
      width,
      height: 320,
      marginLeft: 56,
      marginBottom: 42,
      marginRight: 30,
      x: nodesAxis(all),
      y: {
        type: "log",
        label: "↑ samples a second",
        labelArrow: "none",
        grid: true,
        tickFormat: (x) => number(x),
        ticks: roundTicks(d3.extent([...all.map((p) => p.speed), ...ideal.map((p) => p.y)])),
      },
      color: colours(),
      symbol: symbols(),
      marks: [
        Plot.lineY(ideal, { x: "n", y: "y", stroke: "currentColor", strokeDasharray: "5 4", strokeOpacity: 0.6 }),
        Plot.text([ideal.at(-1)], { x: "n", y: "y", text: ["ideal"], dy: -9, dx: -14, fill: "currentColor" }),
        Plot.lineY(all, { x: "nodes", y: "speed", z: "strategy", stroke: "strategy", strokeWidth: 2 }),
        Plot.dot(all, {
          x: "nodes",
          y: "speed",
          fill: "strategy",
          symbol: (p) => p.strategy,
          r: 5,
          stroke: "var(--paper)",
        }),
        Plot.tip(
          all,
          Plot.pointer({
            x: "nodes",
            y: "speed",
            title: (p) =>
              `${p.strategy}\n${p.nodes} nodes: ${number(p.speed)} samples/s\nefficiency ${percent(p.efficiency)}`,
          }),
        ),
      ],
    });
  };
  const rows = () => [
    ["strategy", "nodes", "workers", "samples a second", "efficiency"],
    scales().map((p) => [p.strategy, `${p.nodes}`, `${p.workers}`, number(p.speed), percent(p.efficiency)]),
  ];
  return figure(
    "What more nodes bring",
    "Samples a second of all workers together. Dashed: as many times what the best of the fewest nodes did.",
    draw,
    rows,
  );
}

export function efficiency() {
  const draw = (width) => {
    const all = scales();
    if (!all.length) return null;
    return Plot.plot({
      width,
      height: 320,
      marginTop: 28,
      marginLeft: 50,
      marginBottom: 42,
      marginRight: 20,
      x: nodesAxis(all),
      y: {
        label: "↑ efficiency",
        labelArrow: "none",
        grid: true,
        zero: true,
        percent: true,
        tickFormat: (x) => `${x} %`,
      },
      color: colours(),
      symbol: symbols(),
      marks: [
        Plot.ruleY([1], { stroke: "currentColor", strokeDasharray: "5 4", strokeOpacity: 0.6 }),
        Plot.lineY(all, { x: "nodes", y: "efficiency", z: "strategy", stroke: "strategy", strokeWidth: 2 }),
        Plot.dot(all, {
          x: "nodes",
          y: "efficiency",
          fill: "strategy",
          symbol: (p) => p.strategy,
          r: 5,
          stroke: "var(--paper)",
        }),
      ],
    });
  };
  return figure("How well they are used", "Samples a second beside the dashed line; servers count as nodes.", draw);
}
