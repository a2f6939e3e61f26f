// SPDX-License-Identifier: Apache-2.0
// Each node's shares of time, and step times.

import { el, figure, keys } from "./dom.js";
import { roundTicks } from "./curves.js";
import { count, number, percent, seconds } from "./format.js";
import { byStrategy, colours, nameOf, runs, shown, symbols, loaded } from "./state.js";

export const KINDS = ["compute", "communicate", "send", "receive", "wait", "other"];
const MOST = 64; // nodes drawn one by one
const MOST_LINES = 16;

export function chosen() {
  return loaded.report.runs[shown.run];
}

function shares(run) {
  return run.nodes.map((node) => {
    const spent = { ...node.spent };
    spent.other = Math.max(0, node.seconds - d3.sum(Object.values(spent)));
    return {
      node,
      name: nameOf(run, node.node),
      spent,
      whole: Math.max(node.seconds, d3.sum(Object.values(spent))) || 1,
    };
  });
}

// One bar for each node of a run, the longest waiting first.
export function breakdown() {
  const measure = () => shares(chosen()).sort((a, b) => b.spent.wait / b.whole - a.spent.wait / a.whole);
  const draw = (width) => {
    const all = measure();
    if (!all.length) return null;
    const some = all.slice(0, MOST);
    const pieces = some.flatMap((s) =>
      KINDS.filter((kind) => s.spent[kind] > 0).map((kind) => ({
        name: s.name,
        kind,
        share: s.spent[kind] / s.whole,
        seconds: s.spent[kind],
      })),
    );
    const present = KINDS.filter((kind) => pieces.some((p) => p.kind === kind));
    const chart = Plot.plot({
      width,
      height: 46 + Math.max(16, Math.min(30, 900 / some.length)) * some.length,
      marginLeft: 74,
      marginRight: 16,
      x: { label: null, percent: true, domain: [0, 100], tickFormat: (x) => `${x} %`, ticks: 5 },
      y: { domain: some.map((s) => s.name), label: null, tickSize: 0 },
      color: { domain: present, range: present.map((kind) => `var(--${kind})`) },
      marks: [
        Plot.barX(
          pieces,
          Plot.stackX({
            order: KINDS,
            x: "share",
            y: "name",
            fill: "kind",
            z: "kind",
            insetTop: 1.5,
            insetBottom: 1.5,
            title: (p) => `${p.name}: ${p.kind} ${percent(p.share)}, ${seconds(p.seconds)}`,
          }),
        ),
        Plot.text(
          pieces.filter((p) => p.share > (width < 500 ? 0.14 : 0.06) && some.length <= 32),
          Plot.stackX({
            order: KINDS,
            x: "share",
            y: "name",
            z: "kind",
            text: (p) => percent(p.share),
            fill: (p) =>
              p.kind === "compute" ? "#fff" : p.kind === "wait" || p.kind === "other" ? "var(--ink)" : "#1b1f24",
            fontSize: 11,
          }),
        ),
      ],
    });
    return el("div", {}, keys(present.map((kind) => [kind, `var(--${kind})`])), chart);
  };
  const rows = () => [
    ["node", "steps", "compute", "communicate", "send", "receive", "wait", "other"],
    measure().map((s) => [
      s.name,
      number(s.node.steps),
      ...KINDS.map((kind) => (s.spent[kind] == null ? "–" : percent(s.spent[kind] / s.whole))),
    ]),
  ];
  const caption = () => {
    const run = chosen();
    const more = run.nodes.length > MOST ? ` The ${MOST} of ${run.nodes.length} nodes that waited most.` : "";
    return `${run.strategy}, seed ${run.seed}: ${seconds(run.seconds)}${run.virtual ? " of virtual time" : ""}. Sorted by waiting; other: what no op accounts for.${more}`;
  };
  return figure("Where the time went", caption, draw, rows, "No node has reported yet.");
}

// The distribution of step times: one line for each strategy, over all its workers.
export function stepTimes() {
  const measure = () =>
    [...byStrategy(runs())].flatMap(([strategy, members]) => {
      // Every worker has the same number of quantiles, each weighted by the worker's number of steps.
      const each = (w) => w.seconds.map((x) => ({ x, steps: w.count / w.seconds.length }));
      const found = d3.sort(
        members.flatMap((run) => run.step_times.flatMap(each)),
        (q) => q.x,
      );
      const until = d3.cumsum(found, (q) => q.steps);
      const at = (share) => found[Math.min(found.length - 1, d3.bisectRight(until, share * until.at(-1)))].x;
      return found.length
        ? [{ strategy, at, all: d3.range(0, 1.001, 0.01).map((share) => ({ strategy, share, x: at(share) })) }]
        : [];
    });
  return distribution(
    "How long steps took",
    () => `Share of steps that took no longer, all workers of ${count(runs().length, "run")} together.`,
    measure,
    colours,
    symbols,
  );
}

// The same for each worker of the chosen run: a straggler stands apart.
export function workerTimes() {
  const measure = () =>
    d3
      .sort(d3.sort(chosen().step_times, (w) => -w.seconds[50]).slice(0, MOST_LINES), (w) => w.node)
      .map((w) => ({
        strategy: nameOf(chosen(), w.node),
        at: (share) => w.seconds[Math.min(100, Math.round(100 * share))],
        all: w.seconds.map((x, i) => ({ strategy: nameOf(chosen(), w.node), share: i / 100, x })),
      }));
  const shades = () => {
    const names = measure().map((w) => w.strategy);
    return {
      domain: names,
      range: names.map(
        (_, i) => `color-mix(in oklab, var(--accent) ${100 - (80 * i) / Math.max(1, names.length - 1)}%, var(--heat))`,
      ),
    };
  };
  return distribution(
    "How long the steps of each worker took",
    () =>
      `${chosen().strategy}, seed ${chosen().seed}. A worker that is slower than others stands to the right.${chosen().workers > MOST_LINES ? ` The ${MOST_LINES} slowest.` : ""}`,
    measure,
    shades,
  );
}

function distribution(title, caption, measure, colour, symbols = null) {
  const draw = (width) => {
    const groups = measure();
    const all = groups.flatMap((g) => g.all).filter((p) => p.x > 0);
    if (!all.length) return null;
    const spread = d3.max(all, (p) => p.x) / d3.min(all, (p) => p.x);
    const { domain, range } = colour();
    const chart = Plot.plot({
      width,
      marginTop: 28,
      height: 280,
      marginLeft: 50,
      marginBottom: 42,
      marginRight: 20,
      x: {
        type: "log",
        label: "seconds of a step →",
        labelAnchor: "right",
        labelArrow: "none",
        tickFormat: (x) => seconds(x),
        ticks: roundTicks(
          d3.extent(all, (p) => p.x),
          width < 420 ? 4 : 8,
        ),
        ...(spread < 1.2 ? { domain: [d3.min(all, (p) => p.x) * 0.9, d3.max(all, (p) => p.x) * 1.1] } : {}),
      },
      y: { label: "↑ share of steps", labelArrow: "none", grid: true, percent: true, tickFormat: (x) => `${x} %` },
      color: { domain, range },
      ...(symbols ? { symbol: symbols() } : {}),
      marks: [
        Plot.lineY(all, { x: "x", y: "share", z: "strategy", stroke: "strategy", strokeWidth: 2, curve: "step-after" }),
        symbols &&
          Plot.dot(
            all.filter((p) => [0.2, 0.5, 0.8].some((share) => Math.abs(p.share - share) < 1e-9)),
            { x: "x", y: "share", fill: "strategy", symbol: (p) => p.strategy, r: 4, stroke: "var(--paper)" },
          ),
        Plot.tip(
          all,
          Plot.pointer({
            x: "x",
            y: "share",
            title: (p) => `${p.strategy}\n${percent(p.share)} of steps within ${seconds(p.x)}`,
          }),
        ),
      ],
    });
    return el("div", {}, keys(domain.map((name, i) => [name, range[i]])), chart);
  };
  const rows = () => [
    ["", "median", "95 %", "99 %"],
    measure().map((g) => [g.strategy, ...[0.5, 0.95, 0.99].map((share) => seconds(g.at(share)))]),
  ];
  return figure(title, caption, draw, rows, "No step has been recorded.");
}
