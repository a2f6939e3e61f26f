// SPDX-License-Identifier: Apache-2.0
// Bytes: against the formula, between every two nodes, and as messages in motion.

import { el, figure, svg } from "./dom.js";
import { bytes, mean } from "./format.js";
import { brief, byStrategy, colours, nameOf, runs } from "./state.js";
import { chosen } from "./workers.js";

const MOST = 128; // nodes; as in model.py

function missing() {
  const { workers, servers, sent_total } = chosen();
  if (!sent_total) return "Nothing was sent.";
  return workers + servers > MOST
    ? `More than ${MOST} nodes are not drawn.`
    : "Only totals are known: run it with --trace to see the messages between nodes.";
}

// What a worker sent, and a tick where the formula on the strategy's page would have it.
export function againstFormula() {
  const measure = () =>
    [...byStrategy(runs())].map(([strategy, members]) => {
      const known = members.filter((run) => run.formula);
      return {
        strategy,
        sent: mean(members.map((run) => run.sent_per_worker)),
        received: mean(members.map((run) => run.received_per_worker)),
        formula: known.length ? mean(known.map((run) => run.formula.bytes)) : null,
        text: known[0]?.formula.text ?? "no formula: it depends on the order of arrival",
      };
    });
  const draw = (width) => {
    const found = measure();
    if (!found.length) return null;
    const narrow = width < 420;
    const name = (s) => brief(s, narrow ? 14 : 24);
    return Plot.plot({
      width,
      height: 50 + 34 * found.length,
      marginLeft: 14 + 6.9 * d3.max(found, (r) => name(r.strategy).length),
      marginRight: 70,
      marginBottom: 40,
      x: {
        label: "bytes sent by a worker →",
        labelAnchor: "right",
        labelArrow: "none",
        grid: true,
        zero: true,
        tickFormat: bytes,
        ticks: narrow ? 3 : 6,
      },
      y: { domain: found.map((r) => r.strategy), label: null, tickFormat: name, tickSize: 0 },
      color: colours(),
      marks: [
        Plot.barX(found, { x: "sent", y: "strategy", fill: "strategy", insetTop: 5, insetBottom: 5 }),
        Plot.tickX(
          found.filter((r) => r.formula != null),
          { x: "formula", y: "strategy", stroke: "var(--ink)", strokeWidth: 3 },
        ),
        Plot.text(found, {
          x: (r) => Math.max(r.sent, r.formula ?? 0),
          y: "strategy",
          text: (r) => bytes(r.sent),
          textAnchor: "start",
          dx: 7,
          fill: "currentColor",
        }),
      ],
    });
  };
  const rows = () => [
    [
      "strategy",
      "sent by a worker",
      "by formula",
      "received by a worker",
      "formula (S: bytes of the model, N: workers)",
    ],
    measure().map((r) => [
      r.strategy,
      bytes(r.sent),
      r.formula == null ? "–" : `${bytes(r.formula)}${Math.abs(r.sent - r.formula) < 1 ? " ✓" : ""}`,
      bytes(r.received),
      r.text,
    ]),
  ];
  const caption = "Mean over workers and seeds. The tick across is the formula on the strategy's page.";
  return figure("Bytes of a worker against the formula", caption, draw, rows);
}

// Bytes from each node to each other.
export function matrix() {
  const cells = () => {
    const run = chosen();
    return (run.traffic?.flow ?? []).map(([from, to, size]) => ({
      from: nameOf(run, from),
      to: nameOf(run, to),
      size,
    }));
  };
  const draw = (width) => {
    const run = chosen();
    if (!run.traffic?.flow.length) return null;
    const nodes = d3.range(run.workers + run.servers);
    const names = nodes.map((node) => nameOf(run, node));
    const side = Math.min(width, 540);
    const short = (name) => name.replace("worker ", "w").replace("server ", "s");
    const every = Math.ceil(nodes.length / 24);
    const most = d3.max(cells(), (c) => c.size);
    const padding = nodes.length > 30 ? 0 : 0.04;
    return Plot.plot({
      width: side,
      height: side - 10,
      marginLeft: 46,
      marginTop: 50,
      x: {
        domain: names,
        padding,
        label: "to →",
        labelAnchor: "right",
        labelArrow: "none",
        axis: "top",
        tickFormat: (n, i) => (i % every ? "" : short(n)),
        tickSize: 0,
      },
      y: {
        domain: names,
        padding,
        label: "from ↓",
        labelArrow: "none",
        tickFormat: (n, i) => (i % every ? "" : short(n)),
        tickSize: 0,
      },
      color: { type: "linear", domain: [0, most], interpolate: mixed },
      marks: [
        Plot.frame({ stroke: "var(--line)" }),
        Plot.cell(cells(), {
          x: "to",
          y: "from",
          fill: "size",
          title: (c) => `${c.from} to ${c.to}: ${bytes(c.size)}`,
        }),
        nodes.length <= 9 && side > 300
          ? Plot.text(cells(), {
              x: "to",
              y: "from",
              text: (c) => bytes(c.size),
              fill: (c) => (c.size > 0.45 * most ? "var(--paper)" : "var(--ink)"),
              fontSize: nodes.length > 6 ? 9 : 11,
            })
          : null,
      ],
    });
  };
  const rows = () => [
    ["from", "to", "bytes"],
    cells()
      .slice(0, 400)
      .map((c) => [c.from, c.to, bytes(c.size)]),
  ];
  const caption = () =>
    `${chosen().strategy}, seed ${chosen().seed}${chosen().traffic ? `; ${chosen().traffic.source}` : ""}.`;
  return figure("Bytes from each node to each other", caption, draw, rows, missing);
}

const mixed = (share) => `color-mix(in oklab, var(--accent) ${Math.round(8 + 92 * share)}%, var(--paper))`;

// The nodes on a circle, servers in the middle, and what travels between them.
export function network() {
  let moving = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  let turn = 0;
  const draw = () => {
    const run = chosen();
    const mine = ++turn; // an animation that was drawn over stops
    if (!run.traffic?.flow.length) return null;
    const place = places(run);
    const most = d3.max(run.traffic.flow, ([, , size]) => size);
    const edges = run.traffic.flow
      .filter(([, , size]) => size > 0)
      .map(([from, to, size]) => ({
        from,
        to,
        size,
        path: bow(place[from], place[to]),
        width: 0.5 + 3 * Math.sqrt(size / most),
      }));
    const many = edges.length > 60;
    const picture = svg("svg", { viewBox: "-220 -220 440 440", class: "network" });
    picture.append(
      svg(
        "g",
        { fill: "none", stroke: "var(--soft)" },
        ...edges.map((e) =>
          svg("path", { d: e.path.d, "stroke-width": e.width, "stroke-opacity": many ? 0.15 : 0.35 }),
        ),
      ),
    );
    const dots = svg("g", { fill: "var(--heat)" });
    picture.append(dots, ...place.map((p, node) => knot(run, p, node)));
    const travel = run.trace ? replayed(run, edges) : steady(edges, most);
    const step = (now) => {
      if (mine !== turn || !picture.isConnected) return;
      if (moving) travel(now / 1000, dots);
      requestAnimationFrame(step);
    };
    travel(0.4, dots);
    requestAnimationFrame(step);
    const button = el(
      "button",
      {
        type: "button",
        "aria-pressed": `${!moving}`,
        onclick: () => {
          moving = !moving;
          button.textContent = moving ? "Pause" : "Play";
          button.setAttribute("aria-pressed", `${!moving}`);
        },
      },
      moving ? "Pause" : "Play",
    );
    return el("div", {}, picture, el("div", { class: "controls", style: "justify-content: center" }, button));
  };
  const rows = () => [
    ["node", "sent", "received"],
    chosen().nodes.map((n) => [nameOf(chosen(), n.node), bytes(n.sent), bytes(n.received)]),
  ];
  const caption = () => {
    const run = chosen();
    if (!run.traffic) return `${run.strategy}, seed ${run.seed}.`;
    const how = run.trace ? "Messages as they were sent, slowed down." : "The more bytes, the more dots.";
    return `${run.strategy}, seed ${run.seed}: thicker lines carried more bytes; ${run.traffic.source}. ${how}`;
  };
  return figure("The network", caption, draw, rows, missing);
}

function places(run) {
  const [n, m] = [run.workers, run.servers];
  const around = (i, of, r) => [r * Math.sin((2 * Math.PI * i) / of), -r * Math.cos((2 * Math.PI * i) / of)];
  return [
    ...d3.range(n).map((i) => around(i, n, 180)),
    ...d3.range(m).map((i) => (m === 1 ? [0, 0] : around(i + 0.5, m, 70))),
  ];
}

// A curve a little to the right of the straight way, so that there and back are two.
function bow([x1, y1], [x2, y2]) {
  const [mx, my] = [(x1 + x2) / 2 - (y2 - y1) * 0.09, (y1 + y2) / 2 + (x2 - x1) * 0.09];
  const point = (s) => [
    (1 - s) ** 2 * x1 + 2 * s * (1 - s) * mx + s * s * x2,
    (1 - s) ** 2 * y1 + 2 * s * (1 - s) * my + s * s * y2,
  ];
  return { d: `M${x1},${y1}Q${mx},${my} ${x2},${y2}`, point };
}

function knot(run, [x, y], node) {
  const server = node >= run.workers;
  const many = run.workers > 24;
  const r = server ? 17 : many ? 6 : 15;
  const form = server
    ? svg("rect", {
        x: x - r,
        y: y - r,
        width: 2 * r,
        height: 2 * r,
        rx: 4,
        fill: "var(--raised)",
        stroke: "var(--ink)",
        "stroke-width": 1.5,
      })
    : svg("circle", { cx: x, cy: y, r, fill: "var(--raised)", stroke: "var(--ink)", "stroke-width": 1.5 });
  const text = svg(
    "text",
    { x, y, dy: "0.35em", "text-anchor": "middle", "font-size": 12, fill: "var(--ink)" },
    many && !server ? "" : `${server ? "s" : "w"}${server ? node - run.workers : node}`,
  );
  return svg("g", {}, svg("title", {}, nameOf(run, node)), form, text);
}

// Without a trace: dots at an even pace, more of them where more was sent.
function steady(edges, most) {
  const room =
    240 /
    Math.max(
      1,
      d3.sum(edges, (e) => Math.max(1, Math.round((4 * e.size) / most))),
    );
  const travellers = edges
    .flatMap((e, k) => {
      const number = Math.max(1, Math.round((4 * e.size) / most) * Math.min(1, room));
      return d3.range(number).map((i) => ({ e, offset: i / number + ((k * 0.618) % 1) }));
    })
    .slice(0, 400);
  return (now, dots) =>
    put(
      dots,
      travellers.map(({ e, offset }) => ({ at: e.path.point((now * 0.35 + offset) % 1), r: 2.6 })),
    );
}

// With a trace: the first messages, again and again, in twenty seconds.
function replayed(run, edges) {
  const { node, kind, kinds, began, took, peer, bytes: sizes } = run.trace;
  const sends = d3
    .range(node.length)
    .filter((i) => kinds[kind[i]] === "send" && peer[i] != null)
    .slice(0, 3000);
  const way = new Map(edges.map((e) => [`${e.from} ${e.to}`, e]));
  const most = d3.max(sends, (i) => sizes[i]) || 1;
  const [start, end] = [d3.min(sends, (i) => began[i]) ?? 0, d3.max(sends, (i) => began[i] + took[i]) ?? 1];
  const least = (end - start) * 0.01; // shorter ones would not be visible
  return (now, dots) => {
    const t = start + ((now / 20) % 1) * (end - start);
    const there = sends.filter(
      (i) => began[i] <= t && t < began[i] + Math.max(took[i], least) && way.has(`${node[i]} ${peer[i]}`),
    );
    put(
      dots,
      there.map((i) => ({
        at: way.get(`${node[i]} ${peer[i]}`).path.point((t - began[i]) / Math.max(took[i], least)),
        r: 2 + 4 * Math.sqrt(sizes[i] / most),
      })),
    );
  };
}

function put(dots, wanted) {
  while (dots.children.length < wanted.length) dots.append(svg("circle", {}));
  while (dots.children.length > wanted.length) dots.lastChild.remove();
  wanted.forEach(({ at: [x, y], r }, i) => {
    const dot = dots.children[i];
    dot.setAttribute("cx", x.toFixed(1));
    dot.setAttribute("cy", y.toFixed(1));
    dot.setAttribute("r", r.toFixed(1));
  });
}
