// SPDX-License-Identifier: Apache-2.0
// The time to the target, and the final score against its cost.

import { apart, NARROW, ticks, write } from "./curves.js";
import { figure } from "./dom.js";
import { count, mean, median, number, seconds } from "./format.js";
import { axisLabel, brief, byStrategy, colours, runs, shown, symbols, loaded } from "./state.js";

const ENOUGH = 6; // times, for a 95 % interval of their median

// Time to the target: a dot for each run, the median with its interval, hollow at the cap where it was not reached.
export function race() {
  const measure = () =>
    [...byStrategy(runs())].map(([strategy, members]) => {
      const times = members.filter((run) => run.reached != null).map((run) => run.reached);
      const cap = Math.max(...members.map((run) => run.seconds));
      return {
        strategy,
        members,
        times,
        cap,
        always: times.length === members.length,
        middle: times.length ? median(times) : null,
        reach: loaded.report.intervals.find((i) => i.strategy === strategy && i.condition === shown.condition)?.ends,
      };
    });
  const order = (a, b) => b.always - a.always || (a.middle ?? Infinity) - (b.middle ?? Infinity);
  const draw = (width) => {
    if (!loaded.report.target) return null;
    const rows = measure().sort(order);
    if (!rows.length) return null;
    const narrow = width < 420;
    const dots = rows.flatMap((r) =>
      r.members.map((run) => ({
        strategy: r.strategy,
        x: run.reached ?? run.seconds,
        hit: run.reached != null,
        seed: run.seed,
      })),
    );
    const name = (s) => brief(s, narrow ? 14 : 24);
    return Plot.plot({
      width,
      height: 52 + 38 * rows.length,
      marginLeft: 14 + 6.9 * d3.max(rows, (r) => name(r.strategy).length),
      marginRight: 62,
      marginBottom: 40,
      x: {
        label: `${axisLabel("t")} to ${loaded.report.target.text} →`,
        labelAnchor: "right",
        labelArrow: "none",
        grid: true,
        zero: true,
        tickFormat: (x) => number(x),
        ticks: narrow ? 4 : 8,
      },
      y: { domain: rows.map((r) => r.strategy), label: null, tickFormat: name, tickSize: 0 },
      color: colours(),
      symbol: symbols(),
      marks: [
        Plot.ruleY(
          rows.filter((r) => r.reach),
          {
            y: "strategy",
            x1: (r) => r.reach[0],
            x2: (r) => r.reach[1],
            stroke: "strategy",
            strokeWidth: 2.5,
          },
        ),
        Plot.tickX(
          rows.filter((r) => r.middle != null),
          { x: "middle", y: "strategy", stroke: "strategy", strokeWidth: 3, insetTop: 7, insetBottom: 7 },
        ),
        Plot.dot(
          dots.filter((d) => d.hit),
          {
            x: "x",
            y: "strategy",
            fill: "strategy",
            symbol: (d) => d.strategy,
            r: 4.5,
            fillOpacity: 0.8,
            stroke: "var(--paper)",
            strokeWidth: 0.75,
          },
        ),
        Plot.dot(
          dots.filter((d) => !d.hit),
          { x: "x", y: "strategy", stroke: "strategy", strokeWidth: 1.75, r: 5, fill: "var(--paper)" },
        ),
        Plot.text(
          rows.filter((r) => !r.always),
          {
            x: (r) => r.cap,
            y: "strategy",
            text: (r) => `not reached in ${r.members.length - r.times.length} of ${count(r.members.length, "run")}`,
            textAnchor: "end",
            dx: -10,
            fill: "currentColor",
            stroke: "var(--paper)",
            strokeWidth: 4,
          },
        ),
        Plot.text(
          rows.filter((r) => r.always),
          {
            x: (r) => Math.max(...r.times),
            y: "strategy",
            text: (r) => seconds(r.middle),
            textAnchor: "start",
            dx: 9,
            fill: "currentColor",
            stroke: "var(--paper)",
            strokeWidth: 4,
          },
        ),
      ],
    });
  };
  const rows = () => [
    ["strategy", "runs", "reached", "median", "from", "to", "all"],
    measure()
      .sort(order)
      .map((r) => [
        r.strategy,
        `${r.members.length}`,
        `${r.times.length}`,
        seconds(r.middle),
        seconds(r.reach?.[0]),
        seconds(r.reach?.[1]),
        r.times.map((t) => seconds(t)).join(", "),
      ]),
  ];
  const caption = () => {
    const counts = measure().map((r) => r.times.length);
    const many = counts.some((n) => n >= ENOUGH);
    const few = counts.some((n) => n > 1 && n < ENOUGH);
    const least = "from the least to the most";
    const what = many ? `over its 95 % interval${few ? `, of less than ${ENOUGH} ${least}` : ""}` : least;
    return `A mark for each run, a bar at the median, a line ${what}. Hollow at the end of its time: not reached.`;
  };
  return figure("Time to the target", caption, draw, rows, "No target is known: give --target SCORE=VALUE.");
}

// The final score against its cost; a line through the strategies that no other beats in both.
export function pareto() {
  const cost = { t: "seconds", samples: "samples", bytes: null };
  const costOf = (run) =>
    shown.axis === "bytes" ? run.sent_per_worker + run.received_per_worker : run[cost[shown.axis]];
  const measure = () => {
    const lower = loaded.report.metrics[shown.metric];
    const found = [...byStrategy(runs())].flatMap(([strategy, members]) => {
      const own = members.filter((run) => run.metrics[shown.metric] != null);
      if (!own.length) return [];
      const [xs, ys] = [own.map(costOf), own.map((run) => run.metrics[shown.metric])];
      return [
        {
          strategy,
          x: mean(xs),
          y: +mean(ys).toPrecision(6), // what differs by rounding is equal
          x1: Math.min(...xs),
          x2: Math.max(...xs),
          y1: Math.min(...ys),
          y2: Math.max(...ys),
        },
      ];
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
      x: {
        label: `${axisLabel()} →`,
        labelAnchor: "right",
        labelArrow: "none",
        grid: true,
        zero: true,
        tickFormat: ticks(shown.axis),
        ticks: width < NARROW ? 4 : 7,
      },
      y: {
        label: `↑ final ${shown.metric}`,
        labelArrow: "none",
        grid: true,
        nice: true,
        tickFormat: (x) => number(x, 4),
      },
      color: colours(),
      symbol: symbols(),
      marks: [
        Plot.lineY(front, {
          x: "x",
          y: "y",
          curve: "step-after",
          stroke: "currentColor",
          strokeOpacity: 0.5,
          strokeDasharray: "3 3",
        }),
        Plot.ruleX(found, {
          x: "x",
          y1: "y1",
          y2: "y2",
          stroke: "strategy",
          strokeOpacity: (p) => (p.front ? 1 : 0.4),
        }),
        Plot.ruleY(found, {
          y: "y",
          x1: "x1",
          x2: "x2",
          stroke: "strategy",
          strokeOpacity: (p) => (p.front ? 1 : 0.4),
        }),
        Plot.dot(found, {
          x: "x",
          y: "y",
          fill: "strategy",
          symbol: (p) => p.strategy,
          r: 6.5,
          fillOpacity: (p) => (p.front ? 1 : 0.45),
          stroke: "var(--paper)",
        }),
      ],
    });
    beside(chart, found);
    return chart;
  };
  const rows = () => [
    ["strategy", axisLabel(), `final ${shown.metric}`, "none better in both"],
    measure().map((p) => [p.strategy, ticks(shown.axis)(p.x), number(p.y, 4), p.front ? "yes" : "no"]),
  ];
  const caption = () =>
    `Final ${shown.metric} against the whole run's ${axisLabel()}: means over seeds, from least to most. On the dashed line: none is better in both.`;
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
      const entry = d3
        .select(chart)
        .append("g")
        .attr("transform", `translate(${x.apply(p.x) + (right ? -11 : 11)},${height})`)
        .attr("opacity", p.front ? 1 : 0.65);
      entry.attr("stroke", "var(--paper)").attr("stroke-width", 4).attr("paint-order", "stroke");
      write(entry, brief(p.strategy, x.range[1] < 420 ? 14 : 24), 0, right ? "end" : "start");
    }
  }
}
