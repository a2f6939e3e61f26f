// SPDX-License-Identifier: Apache-2.0
// Loss and scores against time, samples or bytes; how long to the target; what is best in two ways.

import { figure } from "./dom.js";
import { at, bytes, count, mean, median, number, seconds } from "./format.js";
import { axisLabel, brief, byStrategy, colours, runs, shape, shown, symbols, told } from "./state.js";

const GRID = 160; // points of a median over seeds
const NARROW = 560; // pixels: no room for names beside the lines

export function ticks(axis) {
  return axis === "bytes" ? (x) => bytes(x) : (x) => number(x);
}

// The curves of every strategy: those of single seeds, and their median.
function collect(pick) {
  const found = [];
  for (const [strategy, members] of byStrategy(runs())) {
    const curves = members.map(pick).filter((curve) => curve && curve.x.length);
    if (!curves.length) continue;
    const end = Math.min(...curves.map((curve) => curve.x.at(-1)));
    const start = Math.max(...curves.map((curve) => curve.x[0]));
    let middle = curves[0];
    if (curves.length > 1) {
      const x = d3.range(GRID).map((i) => start + ((end - start) * i) / (GRID - 1));
      middle = { x, y: x.map((value) => median(curves.map((curve) => at(curve.x, curve.y, value)))) };
    }
    found.push({ strategy, curves, middle });
  }
  return found;
}

const points = (curve, more) => curve.x.map((x, i) => ({ x, y: curve.y[i], ...more })).filter((p) => p.y != null);

// A few marks along a line, so that it is known by more than its colour.
function along(curve, strategy, order) {
  const marks = [];
  const all = points(curve, { strategy });
  const [first, last] = [all[0]?.x ?? 0, all.at(-1)?.x ?? 0];
  for (let k = 0; k < 8; k++) {
    const x = first + ((last - first) * (k + 0.4 + 0.07 * order)) / 8;
    const y = at(all.map((p) => p.x), all.map((p) => p.y), x);
    if (all.length) marks.push({ x, y, strategy });
  }
  return marks;
}

// Names beside the ends of the lines, and the target's, moved apart where they would overlap.
function label(chart, groups, target) {
  const [x, y] = [chart.scale("x"), chart.scale("y")];
  const places = groups.map((g) => ({ g, text: cut(g.strategy), y: y.apply(points(g.middle).at(-1).y) }));
  if (target != null) places.push({ text: `target ${number(target)}`, y: y.apply(target) });
  apart(places, 15, Math.max(...y.range));
  for (const { g, text, y: height } of places) {
    const entry = d3.select(chart).append("g").attr("transform", `translate(${x.range[1] + 12},${height})`);
    if (g) entry.node().append(shape(g.strategy, 45));
    write(entry, text, g ? 9 : -6);
  }
}

function write(entry, text, x, anchor = "start") {
  entry.append("text").attr("x", x).attr("dy", "0.32em").attr("text-anchor", anchor).attr("fill", "currentColor").text(text);
}

function apart(places, room, lowest) {
  places.sort((a, b) => a.y - b.y);
  places.forEach((place, i) => {
    if (i) place.y = Math.max(place.y, places[i - 1].y + room);
  });
  for (let i = places.length - 1; i >= 0; i--) places[i].y = Math.min(places[i].y, i === places.length - 1 ? lowest : places[i + 1].y - room);
}

// Round numbers on a logarithmic scale, not too many; of several decades d3 writes no fives.
export function roundTicks([least, most], room = 8) {
  const tens = d3.range(Math.floor(Math.log10(least)), Math.ceil(Math.log10(most)) + 1);
  const among = (factors) => tens.flatMap((k) => factors.map((f) => f * 10 ** k)).filter((x) => x >= least * 0.999 && x <= most * 1.001);
  if (among([1, 2, 5]).length < 3) return d3.ticks(least, most, room / 2);
  const ways = most / least < 100 ? [[1, 2, 5], [1, 3], [1]] : [[1, 3], [1]];
  return ways.map(among).find((ticks) => ticks.length <= room) ?? among([1]);
}

const cut = (strategy) => brief(strategy, 24);

export function lines(title, caption, pick, { name, log = false, target = null, nothing } = {}) {
  const draw = (width) => {
    const groups = collect(pick);
    if (!groups.length) return null;
    const reach = d3.extent(groups.flatMap((g) => g.curves.flatMap((c) => c.y)));
    const logarithmic = log && reach[0] > 0;
    const roomy = width >= NARROW && groups.length <= 7;
    const thin = groups.flatMap((g) => (g.curves.length > 1 ? g.curves.flatMap((c, i) => points(c, { strategy: g.strategy, z: `${g.strategy} ${i}` })) : []));
    const thick = groups.flatMap((g) => points(g.middle, { strategy: g.strategy }));
    const marks = groups.flatMap((g, i) => along(g.middle, g.strategy, i));
    const chart = Plot.plot({
      width,
      height: Math.max(260, Math.min(380, width * 0.55)),
      marginLeft: 52,
      marginRight: roomy ? 34 + 7 * d3.max(groups, (g) => cut(g.strategy).length) : 14,
      marginBottom: 42,
      x: { label: `${axisLabel()} →`, labelAnchor: "right", labelArrow: "none", tickFormat: ticks(shown.axis), ticks: width < NARROW ? 4 : 8 },
      y: { label: `↑ ${name}`, labelArrow: "none", grid: true, type: logarithmic ? "log" : "linear", ...(logarithmic ? { ticks: roundTicks(reach) } : {}), tickFormat: (x) => number(x) },
      color: colours(),
      symbol: symbols(),
      marks: [
        target == null ? null : Plot.ruleY([target], { stroke: "currentColor", strokeDasharray: "4 4" }),
        target == null || roomy ? null : Plot.text([`target ${number(target)}`], { y: target, frameAnchor: "right", textAnchor: "end", dy: 10, fill: "currentColor", stroke: "var(--paper)", strokeWidth: 4 }),
        Plot.lineY(thin, { x: "x", y: "y", z: "z", stroke: "strategy", strokeWidth: 0.75, strokeOpacity: 0.4 }),
        Plot.lineY(thick, { x: "x", y: "y", z: "strategy", stroke: "strategy", strokeWidth: 2.25 }),
        Plot.dot(marks, { x: "x", y: "y", fill: "strategy", symbol: "strategy", r: 4, stroke: "var(--paper)", strokeWidth: 0.75 }),
        Plot.tip(thick, Plot.pointer({ x: "x", y: "y", title: (p) => `${p.strategy}\n${axisLabel()} ${ticks(shown.axis)(p.x)}\n${name} ${number(p.y, 4)}` })),
      ],
    });
    const picture = chart.tagName === "svg" ? chart : chart.querySelector("svg");
    picture.scale ??= chart.scale;
    if (roomy) label(picture, groups, target);
    return chart;
  };
  const rows = () => {
    const groups = collect(pick);
    const lines = groups.flatMap((g) =>
      [0, 0.1, 0.25, 0.5, 0.75, 1].map((share) => {
        const x = g.middle.x[0] + share * (g.middle.x.at(-1) - g.middle.x[0]);
        return [g.strategy, ticks(shown.axis)(x), number(at(g.middle.x, g.middle.y, x), 4)];
      }),
    );
    return [["strategy", axisLabel(), `${name}, median`], lines];
  };
  return figure(title, caption, draw, rows, nothing);
}

export const trainingLoss = (run) => run.training && { x: run.training[shown.axis], y: run.training.loss };
export const score = (run) =>
  run.scores?.metrics[shown.metric] && { x: run.scores[shown.axis], y: run.scores.metrics[shown.metric] };

// Time to the target: a dot for each run, the median with its interval, hollow at the cap where it was not reached.
export function race() {
  const measure = () =>
    [...byStrategy(runs())].map(([strategy, members]) => {
      const times = members.filter((run) => run.reached != null).map((run) => run.reached);
      const cap = Math.max(...members.map((run) => run.seconds));
      return { strategy, members, times, cap, always: times.length === members.length, middle: times.length ? median(times) : null };
    });
  const order = (a, b) => b.always - a.always || (a.middle ?? Infinity) - (b.middle ?? Infinity);
  const draw = (width) => {
    if (!told.story.target) return null;
    const rows = measure().sort(order);
    if (!rows.length) return null;
    const narrow = width < 420;
    const dots = rows.flatMap((r) => r.members.map((run) => ({ strategy: r.strategy, x: run.reached ?? run.seconds, hit: run.reached != null, seed: run.seed })));
    const name = (s) => brief(s, narrow ? 14 : 24);
    return Plot.plot({
      width,
      height: 52 + 38 * rows.length,
      marginLeft: 14 + 6.9 * d3.max(rows, (r) => name(r.strategy).length),
      marginRight: 62,
      marginBottom: 40,
      x: { label: `${axisLabel("t")} to ${told.story.target.text} →`, labelAnchor: "right", labelArrow: "none", grid: true, zero: true, tickFormat: (x) => number(x), ticks: narrow ? 4 : 8 },
      y: { domain: rows.map((r) => r.strategy), label: null, tickFormat: name, tickSize: 0 },
      color: colours(),
      symbol: symbols(),
      marks: [
        Plot.ruleY(rows.filter((r) => r.times.length > 1), { y: "strategy", x1: (r) => Math.min(...r.times), x2: (r) => Math.max(...r.times), stroke: "strategy", strokeWidth: 2.5 }),
        Plot.tickX(rows.filter((r) => r.middle != null), { x: "middle", y: "strategy", stroke: "strategy", strokeWidth: 3, insetTop: 7, insetBottom: 7 }),
        Plot.dot(dots.filter((d) => d.hit), { x: "x", y: "strategy", fill: "strategy", symbol: (d) => d.strategy, r: 4.5, fillOpacity: 0.8, stroke: "var(--paper)", strokeWidth: 0.75 }),
        Plot.dot(dots.filter((d) => !d.hit), { x: "x", y: "strategy", stroke: "strategy", strokeWidth: 1.75, r: 5, fill: "var(--paper)" }),
        Plot.text(rows.filter((r) => !r.always), { x: (r) => r.cap, y: "strategy", text: (r) => `not reached in ${r.members.length - r.times.length} of ${count(r.members.length, "run")}`, textAnchor: "end", dx: -10, fill: "currentColor", stroke: "var(--paper)", strokeWidth: 4 }),
        Plot.text(rows.filter((r) => r.always), { x: (r) => Math.max(...r.times), y: "strategy", text: (r) => seconds(r.middle), textAnchor: "start", dx: 9, fill: "currentColor", stroke: "var(--paper)", strokeWidth: 4 }),
      ],
    });
  };
  const rows = () => [
    ["strategy", "runs", "reached", "median", "all"],
    measure().sort(order).map((r) => [r.strategy, `${r.members.length}`, `${r.times.length}`, seconds(r.middle), r.times.map((t) => seconds(t)).join(", ")]),
  ];
  const caption = "A mark for each run, a bar at the median, a line from the least to the most. Hollow at the end of its time: not reached.";
  return figure("Time to the target", caption, draw, rows, "No target is known: give --target SCORE=VALUE.");
}

// What nobody beats in both: the score in the end, and what it cost.
export function pareto() {
  const cost = { t: "seconds", samples: "samples", bytes: null };
  const costOf = (run) => (shown.axis === "bytes" ? run.sent_per_worker + run.received_per_worker : run[cost[shown.axis]]);
  const measure = () => {
    const lower = told.story.metrics[shown.metric];
    const found = [...byStrategy(runs())].flatMap(([strategy, members]) => {
      const own = members.filter((run) => run.metrics[shown.metric] != null);
      if (!own.length) return [];
      const [xs, ys] = [own.map(costOf), own.map((run) => run.metrics[shown.metric])];
      return [{ strategy, x: mean(xs), y: mean(ys), x1: Math.min(...xs), x2: Math.max(...xs), y1: Math.min(...ys), y2: Math.max(...ys) }];
    });
    const better = (a, b) => (lower ? a.y <= b.y : a.y >= b.y) && a.x <= b.x && (a.x < b.x || a.y !== b.y);
    for (const p of found) p.front = !found.some((q) => q !== p && better(q, p));
    return found;
  };
  const draw = (width) => {
    const found = measure();
    if (found.length < 2) return null;
    const front = found.filter((p) => p.front).sort((a, b) => a.x - b.x);
    const chart = Plot.plot({
      width,
      height: Math.max(260, Math.min(360, width * 0.6)),
      marginLeft: 56,
      marginRight: 30,
      marginBottom: 42,
      marginTop: 30,
      x: { label: `${axisLabel()} →`, labelAnchor: "right", labelArrow: "none", grid: true, zero: true, tickFormat: ticks(shown.axis), ticks: width < NARROW ? 4 : 7 },
      y: { label: `↑ final ${shown.metric}`, labelArrow: "none", grid: true, nice: true, tickFormat: (x) => number(x, 4) },
      color: colours(),
      symbol: symbols(),
      marks: [
        Plot.lineY(front, { x: "x", y: "y", curve: "step-after", stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "3 3" }),
        Plot.ruleX(found, { x: "x", y1: "y1", y2: "y2", stroke: "strategy", strokeOpacity: (p) => (p.front ? 1 : 0.4) }),
        Plot.ruleY(found, { y: "y", x1: "x1", x2: "x2", stroke: "strategy", strokeOpacity: (p) => (p.front ? 1 : 0.4) }),
        Plot.dot(found, { x: "x", y: "y", fill: "strategy", symbol: (p) => p.strategy, r: 6.5, fillOpacity: (p) => (p.front ? 1 : 0.45), stroke: "var(--paper)" }),
      ],
    });
    beside(chart, found);
    return chart;
  };
  const rows = () => [
    ["strategy", axisLabel(), `final ${shown.metric}`, "nobody better in both"],
    measure().map((p) => [p.strategy, ticks(shown.axis)(p.x), number(p.y, 4), p.front ? "yes" : "no"]),
  ];
  const caption = () => `Final ${shown.metric} against the whole run's ${axisLabel()}: means over seeds, from least to most. On the dashed line: nobody is better in both.`;
  return figure("What it cost to become that good", caption, draw, rows, "This takes two strategies with scores.");
}

// Names beside points: to the left of those far right, moved apart where they would overlap.
function beside(chart, found) {
  const [x, y] = [chart.scale("x"), chart.scale("y")];
  const middle = (x.range[0] + x.range[1]) / 2;
  const sides = d3.groups(found, (p) => x.apply(p.x) > middle);
  for (const [right, own] of sides) {
    const places = own.map((p) => ({ p, y: y.apply(p.y) }));
    apart(places, 15, y.range[0] - 4);
    for (const { p, y: height } of places) {
      const entry = d3.select(chart).append("g").attr("transform", `translate(${x.apply(p.x) + (right ? -11 : 11)},${height})`).attr("opacity", p.front ? 1 : 0.65);
      entry.attr("stroke", "var(--paper)").attr("stroke-width", 4).attr("paint-order", "stroke");
      write(entry, brief(p.strategy, x.range[1] < 420 ? 14 : 24), 0, right ? "end" : "start");
    }
  }
}
