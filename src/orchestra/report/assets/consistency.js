// SPDX-License-Identifier: Apache-2.0
// How old gradients were, how far apart replicas, and what else strategies logged.

import { el, figure } from "./dom.js";
import { roundTicks } from "./curves.js";
import { count, mean, number } from "./format.js";
import { axisLabel, byStrategy, colourOf, colours, runs } from "./state.js";

const UNITS = { staleness: "updates", gap: "steps" };
const WORDS = {
  staleness: ["Age of gradients, in updates", "Updates made between a worker's pull and its push."],
  gap: [
    "How far ahead workers were, in steps",
    "Steps ahead of the slowest worker whenever x was read; the line is the bound that the strategy keeps.",
  ],
};

// A histogram for each strategy, one below the other on one axis.
export function histogram(name) {
  const measure = () =>
    [...byStrategy(runs())].flatMap(([strategy, members]) => {
      const counts = new Map();
      for (const run of members)
        for (const [value, n] of run.counts[name] ?? []) counts.set(value, (counts.get(value) ?? 0) + n);
      const whole = d3.sum(counts.values());
      const bound = members[0].bound?.[0] === name ? members[0].bound[1] : null;
      return whole
        ? [
            {
              strategy,
              whole,
              bound,
              bars: [...counts]
                .sort((a, b) => a[0] - b[0])
                .map(([value, n]) => ({ strategy, value, share: n / whole, n })),
            },
          ]
        : [];
    });
  const average = (g) => d3.sum(g.bars, (b) => b.value * b.share);
  const draw = (width) => {
    const groups = measure();
    if (!groups.length) return null;
    const most = d3.max(groups, (g) =>
      Math.max(
        d3.max(g.bars, (b) => b.value),
        g.bound ?? 0,
      ),
    );
    const wide = Math.max(1, Math.ceil((most + 1) / 60));
    return el(
      "div",
      {},
      ...groups.map((g) => {
        const bars =
          wide === 1
            ? g.bars
            : d3
                .rollups(
                  g.bars,
                  (v) => d3.sum(v, (b) => b.share),
                  (b) => Math.floor(b.value / wide) * wide,
                )
                .map(([value, share]) => ({ value, share }));
        return Plot.plot({
          width,
          height: 130,
          marginLeft: 50,
          marginBottom: 34,
          marginTop: 26,
          x: {
            domain: [-0.6, most + wide],
            label: g === groups.at(-1) ? `${UNITS[name]} →` : null,
            labelAnchor: "right",
            labelArrow: "none",
            tickFormat: (x) => (Number.isInteger(x) ? number(x) : ""),
          },
          y: { label: null, percent: true, grid: true, ticks: 3, tickFormat: (x) => `${x} %` },
          marks: [
            Plot.rectY(bars, {
              x1: (b) => b.value - 0.42 * (wide === 1),
              x2: (b) => b.value + (wide === 1 ? 0.42 : wide),
              y: "share",
              fill: colourOf(g.strategy),
              title: (b) => `${b.value}: ${number(100 * b.share)} %`,
            }),
            g.bound == null
              ? null
              : Plot.ruleX([g.bound + 0.5], { stroke: "var(--ink)", strokeWidth: 2, strokeDasharray: "5 3" }),
            g.bound == null
              ? null
              : Plot.text([`bound ${g.bound}`], {
                  x: g.bound + 0.5,
                  frameAnchor: "top",
                  textAnchor: g.bound > most / 2 ? "end" : "start",
                  dx: g.bound > most / 2 ? -5 : 5,
                  fill: "currentColor",
                  stroke: "var(--paper)",
                  strokeWidth: 5,
                }),
            Plot.text([`${g.strategy}: mean ${number(average(g))}, at most ${d3.max(g.bars, (b) => b.value)}`], {
              frameAnchor: "top-left",
              dy: -20,
              fill: "currentColor",
              fontSize: 12,
            }),
          ],
        });
      }),
    );
  };
  const rows = () => [
    ["strategy", "counted", "mean", "at most", "bound"],
    measure().map((g) => [
      g.strategy,
      number(g.whole),
      number(average(g)),
      `${d3.max(g.bars, (b) => b.value)}`,
      g.bound == null ? "–" : `${g.bound}`,
    ]),
  ];
  return figure(
    ...WORDS[name],
    draw,
    rows,
    name === "staleness" ? "None of these strategies lets gradients grow old." : "No strategy here bounds how many steps a worker may be ahead.",
  );
}

// What strategies logged under a name, by time.
export function said(name) {
  const logarithmic = /consensus|distance|norm/.test(name);
  const measure = () =>
    runs()
      .filter((run) => run.logged[name])
      .map((run) => ({
        run,
        points: run.logged[name].t.map((t, i) => ({ strategy: run.strategy, x: t, y: run.logged[name].value[i] })),
      }));
  const draw = (width) => {
    const all = measure().flatMap((m) => m.points);
    if (!all.length) return null;
    const log = logarithmic && all.every((p) => p.y > 0);
    return Plot.plot({
      width,
      height: 240,
      marginLeft: 56,
      marginBottom: 42,
      x: {
        label: `${axisLabel("t")} →`,
        labelAnchor: "right",
        labelArrow: "none",
        tickFormat: (x) => number(x),
        ticks: width < 560 ? 4 : 8,
      },
      y: {
        label: `↑ ${name}`,
        labelArrow: "none",
        grid: true,
        type: log ? "log" : "linear",
        tickFormat: (x) => number(x),
        ...(log ? { ticks: roundTicks(d3.extent(all, (p) => p.y)) } : {}),
      },
      color: colours(),
      marks: [Plot.lineY(all, { x: "x", y: "y", z: "strategy", stroke: "strategy", strokeWidth: 1.5 })],
    });
  };
  const rows = () => [
    ["strategy", "points", "mean", "last"],
    measure().map((m) => [
      m.run.strategy,
      count(m.points.length, "point"),
      number(mean(m.points.map((p) => p.y))),
      number(m.points.at(-1).y),
    ]),
  ];
  const nothing = "This is measured in runs with --trace, of strategies that average models: orchestra sim ... --trace.";
  return figure(title(name), "Of the first seed of each strategy: the mean over its nodes.", draw, rows, nothing);
}

const title = (name) =>
  /consensus/.test(name) ? "How far apart the replicas were (consensus distance)" : `Logged: ${name}`;

export function names() {
  return [...new Set(["consensus", ...runs({ anyCondition: true }).flatMap((run) => Object.keys(run.logged))])]
    .sort((a, b) => /consensus/.test(b) - /consensus/.test(a) || a.localeCompare(b))
    .slice(0, 8);
}
