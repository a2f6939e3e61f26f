// SPDX-License-Identifier: Apache-2.0
// Who wins where: a map of strategies and conditions, and what more workers bring.

import { figure } from "./dom.js";
import { mean, median, number, percent, seconds } from "./format.js";
import { colours, runs, symbols, told } from "./state.js";

// Seconds to the target, or in all where there is none.
function cells() {
  const groups = d3.group(runs({ anyCondition: true }), (run) => run.condition, (run) => run.strategy);
  const found = [];
  for (const [condition, members] of groups) {
    const column = [...members].map(([strategy, own]) => {
      const times = own.map((run) => (told.story.target ? run.reached : run.seconds)).filter((t) => t != null);
      return { condition, strategy, time: times.length === own.length ? median(times) : null, hit: times.length, of: own.length };
    });
    const best = d3.min(column, (c) => c.time);
    for (const cell of column) Object.assign(cell, { ratio: cell.time == null ? null : cell.time / best, winner: cell.time != null && cell.time === best });
    found.push(...column);
  }
  return found;
}

export function heat() {
  const order = () => told.story.conditions.filter((condition) => cells().some((c) => c.condition === condition));
  const rank = () => d3.sort(d3.groups(cells(), (c) => c.strategy), ([, own]) => mean(own.map((c) => Math.log(c.ratio ?? 1e3)))).map(([strategy]) => strategy);
  const draw = (width) => {
    const all = cells();
    if (order().length < 2) return null;
    const across = width / order().length > 105;
    const [columns, lines] = [order(), rank()];
    const split = (text) => text.split(" · ").join("\n");
    const deep = d3.max(columns, (c) => split(c).split("\n").length);
    const longest = d3.max(across ? lines : columns, (text) => text.length);
    const left = Math.min(width * 0.42, 14 + 6.6 * longest);
    const cut = (text) => (text.length * 6.6 > left ? `${text.slice(0, Math.floor(left / 6.6) - 2)}…` : text);
    // On a narrow screen conditions run down and strategies across.
    const [x, y] = across ? ["condition", "strategy"] : ["strategy", "condition"];
    return Plot.plot({
      width,
      height: (across ? 26 + 16 * deep : 110) + (across ? 50 * lines.length : 44 * columns.length),
      marginLeft: left,
      marginTop: across ? 14 + 16 * deep : 100,
      marginRight: 4,
      x: { domain: across ? columns : lines, axis: "top", label: null, tickSize: 0, tickFormat: across ? split : (s) => (s.length > 15 ? `${s.slice(0, 14)}…` : s), tickRotate: across ? 0 : -50, lineHeight: 1.2 },
      y: { domain: across ? lines : columns, label: null, tickSize: 0, tickFormat: cut },
      color: { type: "log", domain: [1, Math.max(2, d3.max(all, (c) => c.ratio) ?? 2)], range: ["#e9f3fa", "#e8a06a"], interpolate: "lab", unknown: "var(--raised)" },
      marks: [
        Plot.cell(all, { x, y, fill: (c) => c.ratio, inset: 1.5, rx: 3, title: (c) => `${c.strategy}, ${c.condition}: ${c.time == null ? "not always reached" : `${seconds(c.time)}, ${number(c.ratio)} times the best`}` }),
        Plot.cell(all.filter((c) => c.winner), { x, y, fill: "none", stroke: "var(--ink)", strokeWidth: 3, inset: 2, rx: 3 }),
        Plot.text(all, { x, y, text: (c) => (c.time == null ? `${c.hit}/${c.of}` : `${c.winner ? "★ " : ""}${seconds(c.time)}`), fill: (c) => (c.time == null ? "var(--soft)" : "#1b1f24"), fontWeight: (c) => (c.winner ? 700 : 400), dy: across ? -7 : 0, fontSize: across ? 13 : 11 }),
        across ? Plot.text(all.filter((c) => c.ratio != null && !c.winner), { x, y, text: (c) => `${c.ratio.toFixed(2)}×`, fill: "#3b4148", dy: 9, fontSize: 11 }) : null,
      ],
    });
  };
  const rows = () => [["strategy", "condition", "median time", "times the best"], cells().map((c) => [c.strategy, c.condition, c.time == null ? `reached in ${c.hit} of ${c.of}` : seconds(c.time), number(c.ratio)])];
  const what = told.story.target ? `Median seconds to ${told.story.target.text}` : "Median seconds of a run";
  return figure("Who wins under which condition", `${what}; the first of each condition boxed. Below it: times the best. A fraction: the target was not reached in every run.`, draw, rows, "There is only one condition: see orchestra sweep.");
}

// Samples a second against nodes, and the line that as many times the nodes would draw.
function scales() {
  return d3.groups(runs({ anyCondition: true }), (run) => run.strategy).flatMap(([strategy, own]) => {
    const points = d3.groups(own, (run) => run.workers + run.servers).map(([nodes, members]) => ({ strategy, nodes, workers: members[0].workers, speed: mean(members.map((run) => run.samples_per_second)) })).sort((a, b) => a.nodes - b.nodes);
    const [first] = points;
    for (const p of points) Object.assign(p, { ideal: (first.speed * p.nodes) / first.nodes, efficiency: p.speed / p.nodes / (first.speed / first.nodes) });
    return points.length > 1 ? points : [];
  });
}

export function scaling() {
  const draw = (width) => {
    const all = scales();
    if (!all.length) return null;
    const ends = d3.extent(all, (p) => p.nodes);
    const base = d3.max(all.filter((p) => p.efficiency === 1), (p) => p.speed / p.nodes);
    return Plot.plot({
      width, height: 320, marginLeft: 56, marginBottom: 42, marginRight: 30,
      x: { type: "log", base: 2, domain: ends, label: "nodes, servers counted →", labelAnchor: "right", labelArrow: "none", ticks: [...new Set(all.map((p) => p.nodes))], tickFormat: (x) => `${x}` },
      y: { type: "log", label: "↑ samples a second", labelArrow: "none", grid: true, tickFormat: (x) => number(x), ticks: 5 },
      color: colours(), symbol: symbols(),
      marks: [
        Plot.lineY(ends.map((n) => ({ n, y: base * n })), { x: "n", y: "y", stroke: "currentColor", strokeDasharray: "5 4", strokeOpacity: 0.6 }),
        Plot.text([{ n: ends[1], y: base * ends[1] }], { x: "n", y: "y", text: ["ideal"], dy: -9, dx: -14, fill: "currentColor" }),
        Plot.lineY(all, { x: "nodes", y: "speed", z: "strategy", stroke: "strategy", strokeWidth: 2 }),
        Plot.dot(all, { x: "nodes", y: "speed", fill: "strategy", symbol: (p) => p.strategy, r: 5, stroke: "var(--paper)" }),
        Plot.tip(all, Plot.pointer({ x: "nodes", y: "speed", title: (p) => `${p.strategy}\n${p.nodes} nodes: ${number(p.speed)} samples/s\nefficiency ${percent(p.efficiency)}` })),
      ],
    });
  };
  const rows = () => [["strategy", "nodes", "workers", "samples a second", "efficiency"], scales().map((p) => [p.strategy, `${p.nodes}`, `${p.workers}`, number(p.speed), percent(p.efficiency)])];
  return figure("What more nodes bring", "Samples a second of all workers together. Dashed: as many times as fast as there are times the nodes.", draw, rows, "All runs have as many nodes: see orchestra sweep --grid workers=2,4,8.");
}

export function efficiency() {
  const draw = (width) => {
    const all = scales();
    if (!all.length) return null;
    return Plot.plot({
      width, height: 320, marginLeft: 50, marginBottom: 42, marginRight: 20,
      x: { type: "log", base: 2, label: "nodes, servers counted →", labelAnchor: "right", labelArrow: "none", ticks: [...new Set(all.map((p) => p.nodes))], tickFormat: (x) => `${x}` },
      y: { label: "↑ efficiency", labelArrow: "none", grid: true, zero: true, percent: true, tickFormat: (x) => `${x} %` },
      color: colours(), symbol: symbols(),
      marks: [
        Plot.ruleY([1], { stroke: "currentColor", strokeDasharray: "5 4", strokeOpacity: 0.6 }),
        Plot.lineY(all, { x: "nodes", y: "efficiency", z: "strategy", stroke: "strategy", strokeWidth: 2 }),
        Plot.dot(all, { x: "nodes", y: "efficiency", fill: "strategy", symbol: (p) => p.strategy, r: 5, stroke: "var(--paper)" }),
      ],
    });
  };
  return figure("How well they are used", "Samples a second and node, beside those of the fewest nodes.", draw, null, "");
}
