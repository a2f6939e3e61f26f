// SPDX-License-Identifier: Apache-2.0
// Loss and scores against time, samples or bytes.

import { figure } from "./dom.js";
import { at, bytes, median, number } from "./format.js";
import { axisLabel, brief, byStrategy, colours, runs, shape, shown, symbols } from "./state.js";

const GRID = 160; // points of a median over seeds
const FEW = 12; // points of a line that are all marked
export const NARROW = 560; // pixels: no room for names beside the lines

export function ticks(axis) {
  return axis === "bytes" ? (x) => bytes(x) : (x) => number(x);
}

// Without what was not finite: a model with non-finite values has no score.
function finite({ x, y }) {
  const known = (_, i) => y[i] != null;
  return { x: x.filter(known), y: y.filter(known) };
}

// The curves of every strategy: those of single seeds, and their median as far as all of them go.
function collect(pick) {
  const found = [];
  for (const [strategy, members] of byStrategy(runs())) {
    const drawn = (some) =>
      some
        .map(pick)
        .filter(Boolean)
        .map(finite)
        .filter((curve) => curve.x.length);
    const curves = drawn(members);
    if (!curves.length) continue;
    const over = drawn(members.filter((run) => run.over));
    const settled = over.length ? over : curves; // a run that has just begun must not shorten the median of the others
    const start = Math.max(...settled.map((curve) => curve.x[0]));
    const end = Math.max(start, Math.min(...settled.map((curve) => curve.x.at(-1))));
    let middle = settled[0];
    if (settled.length > 1) {
      // A point wherever one was measured and nowhere else, unless that is too many.
      const measured = settled.flatMap((curve) => curve.x.filter((x) => start <= x && x <= end));
      const known = d3.sort(new Set([start, end, ...measured]));
      const even = d3.range(GRID).map((i) => start + ((end - start) * i) / (GRID - 1));
      const x = known.length <= GRID ? known : even;
      middle = { x, y: x.map((value) => median(settled.map((curve) => at(curve.x, curve.y, value)))) };
    }
    found.push({ strategy, curves, middle });
  }
  return found;
}

const points = (curve, more) => curve.x.map((x, i) => ({ x, y: curve.y[i], ...more }));

// A mark at each point of a line, or at some of many, so that lines differ in more than colour.
function along(curve, strategy, order) {
  const all = points(curve, { strategy });
  if (all.length <= FEW) return all;
  const [first, last] = [curve.x[0], curve.x.at(-1)];
  const near = d3.range(8).map((k) => first + ((last - first) * (k + 0.4 + 0.07 * order)) / 8);
  return [...new Set(near.map((x) => d3.bisectCenter(curve.x, x)))].map((i) => all[i]);
}

// Names beside the ends of the lines, and the target's, moved apart where they would overlap.
function label(chart, groups, target) {
  const [x, y] = [chart.scale("x"), chart.scale("y")];
  const places = groups.map((g) => ({ g, text: cut(g.strategy), y: y.apply(points(g.middle).at(-1).y) }));
  if (target != null) places.push({ text: `target ${number(target)}`, y: y.apply(target) });
  apart(places, 15, Math.max(...y.range));
  for (const { g, text, y: height } of places) {
    const entry = d3
      .select(chart)
      .append("g")
      .attr("transform", `translate(${x.range[1] + 12},${height})`);
    if (g) entry.node().append(shape(g.strategy, 45));
    write(entry, text, g ? 9 : -6);
  }
}

export function write(entry, text, x, anchor = "start") {
  entry
    .append("text")
    .attr("x", x)
    .attr("dy", "0.32em")
    .attr("text-anchor", anchor)
    .attr("fill", "currentColor")
    .text(text);
}

export function apart(places, room, lowest) {
  places.sort((a, b) => a.y - b.y);
  places.forEach((place, i) => {
    if (i) place.y = Math.max(place.y, places[i - 1].y + room);
  });
  for (let i = places.length - 1; i >= 0; i--)
    places[i].y = Math.min(places[i].y, i === places.length - 1 ? lowest : places[i + 1].y - room);
}

// Round numbers on a logarithmic scale, not too many; of several decades d3 writes no fives.
export function roundTicks([least, most], room = 8) {
  const tens = d3.range(Math.floor(Math.log10(least)), Math.ceil(Math.log10(most)) + 1);
  const among = (factors) =>
    tens.flatMap((k) => factors.map((f) => f * 10 ** k)).filter((x) => x >= least * 0.999 && x <= most * 1.001);
  if (among([1, 2, 5]).length < 3) return d3.ticks(least, most, room / 2);
  const ways = most / least < 100 ? [[1, 2, 5], [1, 3], [1]] : [[1, 3], [1]];
  return ways.map(among).find((ticks) => ticks.length <= room) ?? among([1]);
}

export const cut = (strategy) => brief(strategy, 24);

// What the options say may change with what is shown, so they are read when it is drawn.
export function lines(title, caption, pick, options) {
  const draw = (width) => {
    const { name, log = false, target = null } = options;
    const groups = collect(pick);
    if (!groups.length) return null;
    const reach = d3.extent(groups.flatMap((g) => g.curves.flatMap((c) => c.y)));
    const logarithmic = log && reach[0] > 0;
    const roomy = width >= NARROW && groups.length <= 7;
    const thin = groups.flatMap((g) =>
      g.curves.length > 1
        ? g.curves.flatMap((c, i) => points(c, { strategy: g.strategy, z: `${g.strategy} ${i}` }))
        : [],
    );
    const thick = groups.flatMap((g) => points(g.middle, { strategy: g.strategy }));
    const marks = groups.flatMap((g, i) => along(g.middle, g.strategy, i));
    const chart = Plot.plot({
      width,
      height: Math.max(260, Math.min(380, width * 0.55)),
      marginLeft: 52,
      marginRight: roomy ? 34 + 7 * d3.max(groups, (g) => cut(g.strategy).length) : 14,
      marginBottom: 42,
      x: {
        label: `${axisLabel()} →`,
        labelAnchor: "right",
        labelArrow: "none",
        tickFormat: ticks(shown.axis),
        ticks: width < NARROW ? 4 : 8,
      },
      y: {
        label: `↑ ${name}`,
        labelArrow: "none",
        grid: true,
        type: logarithmic ? "log" : "linear",
        ...(logarithmic ? { ticks: roundTicks(reach) } : {}),
        tickFormat: (x) => number(x),
      },
      color: colours(),
      symbol: symbols(),
      marks: [
        target == null ? null : Plot.ruleY([target], { stroke: "currentColor", strokeDasharray: "4 4" }),
        target == null || roomy
          ? null
          : Plot.text([`target ${number(target)}`], {
              y: target,
              frameAnchor: "right",
              textAnchor: "end",
              dy: 10,
              fill: "currentColor",
              stroke: "var(--paper)",
              strokeWidth: 4,
            }),
        Plot.lineY(thin, { x: "x", y: "y", z: "z", stroke: "strategy", strokeWidth: 0.75, strokeOpacity: 0.4 }),
        Plot.lineY(thick, { x: "x", y: "y", z: "strategy", stroke: "strategy", strokeWidth: 2.25 }),
        Plot.dot(marks, {
          x: "x",
          y: "y",
          fill: "strategy",
          symbol: "strategy",
          r: 4,
          stroke: "var(--paper)",
          strokeWidth: 0.75,
        }),
        Plot.tip(
          thick,
          Plot.pointer({
            x: "x",
            y: "y",
            title: (p) => `${p.strategy}\n${axisLabel()} ${ticks(shown.axis)(p.x)}\n${name} ${number(p.y, 4)}`,
          }),
        ),
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
    return [["strategy", axisLabel(), `${options.name}, median`], lines];
  };
  return figure(title, caption, draw, rows, options.nothing);
}

export const trainingLoss = (run) => run.training && { x: run.training[shown.axis], y: run.training.loss };
export const score = (run) =>
  run.scores?.metrics[shown.metric] && { x: run.scores[shown.axis], y: run.scores.metrics[shown.metric] };
