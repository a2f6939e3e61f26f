// SPDX-License-Identifier: Apache-2.0
// The timeline of every node. Far away each column of pixels shows shares of time; near enough, single steps and messages.

import { el, keys } from "./dom.js";
import { seconds } from "./format.js";
import { nameOf } from "./state.js";
import { chosen } from "./workers.js";

const [GAP, LEFT, TOP] = [6, 74, 22]; // pixels
let LANE = 26; // higher where there are few
let inks = {}; // of the theme
const MOST_LANES = 64;
const KINDS = ["compute", "wait", "communicate"]; // within a step the order is not recorded: this one is likely
const FEW = 6000; // ops that are drawn one by one

// Totals at the end of every block, so that any window is two look-ups away.
function lanesOf(run) {
  const lanes = run.lanes.slice(0, MOST_LANES).map((lane) => {
    const until = (gains) => Float64Array.from(d3.cumsum(gains), (x) => x / 1e6);
    return {
      node: lane.node,
      together: lane.together,
      t: until(lane.t),
      totals: KINDS.map((kind) => until(lane[kind])),
    };
  });
  for (const node of run.nodes.filter((n) => n.role === "server"))
    lanes.push({ node: node.node, t: null, about: node });
  return lanes;
}

function find(t, x) {
  return d3.bisectLeft(t, x);
}

function totalAt({ t, totals }, kind, x) {
  const i = find(t, x);
  if (i >= t.length) return totals[kind].at(-1) ?? 0;
  const [t0, v0] = i ? [t[i - 1], totals[kind][i - 1]] : [0, 0];
  return v0 + ((totals[kind][i] - v0) * (x - t0)) / (t[i] - t0 || 1);
}

export function timeline() {
  let [run, lanes, from, to, end, ops, traced] = [null, [], 0, 1, 1, null, 0];
  const canvas = el("canvas", { tabindex: 0, role: "img" });
  const mini = el("canvas", { class: "mini", "aria-hidden": "true" });
  const status = el("p", { class: "caption", role: "status", "aria-live": "polite" });
  const hint = el("p", { class: "note" });
  const legend = el("div");
  const view = {
    get window() {
      return [from, to];
    },
  };

  function open() {
    const kept = run?.name === chosen().name && (from > 0 || to < end); // a run that goes on, zoomed in
    run = chosen();
    lanes = run.lanes ? lanesOf(run) : [];
    end = d3.max(run.nodes, (n) => n.seconds) || 1;
    ops = run.trace && opsOf(run.trace);
    traced = run.trace?.left_out ? ops.at(-1).began : Infinity; // until when every op is known
    if (!kept) [from, to] = [0, end];
    legend.replaceChildren(
      keys([
        ["compute", "var(--compute)"],
        ...(ops
          ? [
              ["send", "var(--send)"],
              ["receive", "var(--receive)"],
              ["mean of all, waiting included", "var(--mean)"],
            ]
          : [["communicate", "var(--communicate)"]]),
        ["wait", "var(--wait)"],
      ]),
    );
    const together = d3.max(lanes, (lane) => lane.together ?? 1);
    hint.textContent = [
      ops
        ? "Zoom in for single ops and messages."
        : "Shares of time from afar; zoom in for single steps. The order within a step is not recorded: shown as computing, waiting, communicating. Run it with --trace for messages.",
      together > 1 ? `To save room ${together} steps are drawn as one.` : "",
      run.lanes && run.lanes.length > MOST_LANES ? `The first ${MOST_LANES} of ${run.lanes.length} workers.` : "",
      run.trace?.left_out
        ? `The first ${run.trace.node.length.toLocaleString("en")} ops; ${run.trace.left_out.toLocaleString("en")} more are not in this file.`
        : "",
    ].join(" ");
  }

  function show(a, b) {
    const wide = Math.min(end, Math.max(b - a, end * 1e-6));
    from = Math.max(0, Math.min(a, end - wide));
    to = from + wide;
    paint();
  }
  const zoom = (factor, centre = (from + to) / 2) =>
    show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const steps = () => {
    const lane = lanes.find((l) => l.t?.length > 2);
    if (!lane) return;
    const middle = Math.floor(lane.t.length / 2);
    show(lane.t[Math.max(0, middle - 4)], lane.t[Math.min(lane.t.length - 1, middle + 4)]);
  };

  function paint() {
    if (run !== chosen()) open();
    const width = canvas.parentElement?.clientWidth;
    if (!width) return;
    inks = {};
    LANE = lanes.length <= 8 ? 44 : lanes.length <= 20 ? 30 : 22;
    const height = TOP + lanes.length * (LANE + GAP) + GAP;
    const pen = prepared(canvas, width, height);
    const x = (t) => LEFT + ((t - from) / (to - from)) * (width - LEFT - 8);
    axis(pen, x, from, to, width, height);
    lanes.forEach((lane, i) => paintLane(pen, lane, TOP + GAP + i * (LANE + GAP), x, width));
    const visible = ops && within(ops, from, to);
    if (visible && visible.length <= FEW) paintOps(pen, visible, x, width);
    name(pen, lanes, run);
    overview(width);
    const words = `${seconds(from)} to ${seconds(to)} of ${seconds(end)}`;
    status.textContent = `${run.strategy}, seed ${run.seed}: ${words}${run.virtual ? " of virtual time" : ""}.`;
    canvas.setAttribute(
      "aria-label",
      `Timeline of ${lanes.length} nodes, ${words}. Arrow keys move, plus and minus zoom, 0 shows all.`,
    );
  }

  function paintLane(pen, lane, y, x, width) {
    if (!lane.t) return paintTotals(pen, lane, y, x, width);
    const first = find(lane.t, from);
    const last = Math.min(lane.t.length - 1, find(lane.t, to));
    if (last - first < (width - LEFT) / 5) for (let k = first; k <= last; k++) paintStep(pen, lane, k, y, x);
    else for (let px = LEFT; px < width - 8; px++) paintColumn(pen, lane, y, px, width);
  }

  function paintStep(pen, lane, k, y, x) {
    let at = k ? lane.t[k - 1] : 0;
    KINDS.forEach((kind, j) => {
      const took = lane.totals[j][k] - (k ? lane.totals[j][k - 1] : 0);
      bar(pen, kind, x(at), x(at + took), y, LANE);
      at += took;
    });
    const edge = x(lane.t[k]);
    if (edge > LEFT && x(lane.t[k]) - x(k ? lane.t[k - 1] : 0) > 6)
      ((pen.fillStyle = ink("--paper")), pen.fillRect(edge - 0.5, y, 1, LANE));
  }

  function paintColumn(pen, lane, y, px, width) {
    const time = (p) => from + ((p - LEFT) / (width - LEFT - 8)) * (to - from);
    const [a, b] = [time(px), Math.min(time(px + 1), lane.t.at(-1))];
    if (b <= a) return;
    let height = 0;
    KINDS.forEach((kind, j) => {
      const share = (LANE * (totalAt(lane, j, b) - totalAt(lane, j, a))) / (b - a);
      pen.fillStyle = ink(`--${kind}`);
      pen.fillRect(px, y + LANE - height - share, 1, share);
      height += share;
    });
  }

  // Of a server only totals are known.
  function paintTotals(pen, lane, y, x, width) {
    const { spent, seconds: whole } = lane.about;
    pen.fillStyle = ink("--other");
    pen.fillRect(Math.max(LEFT, x(0)), y, Math.min(x(whole), width - 8) - Math.max(LEFT, x(0)), LANE);
    if (ops) return;
    pen.fillStyle = ink("--soft");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(
      `totals only: waiting ${Math.round((100 * (spent.wait ?? 0)) / (whole || 1))} %`,
      LEFT + 8,
      y + LANE / 2 + 4,
    );
  }

  // In place of what lanes show, as far as ops are known.
  function paintOps(pen, visible, x, width) {
    const row = new Map(lanes.map((lane, i) => [lane.node, TOP + GAP + i * (LANE + GAP)]));
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, Math.max(0, Math.min(width, x(traced)) - LEFT), pen.canvas.height);
    pen.clip();
    for (const i of row.values()) pen.clearRect(LEFT, i, width - LEFT, LANE);
    for (const op of visible) {
      if (!row.has(op.node)) continue;
      // Until a message was sent, its receiver waited.
      const sent = op.kind === "receive" && op.met > op.began ? Math.min(op.met, op.began + op.took) : op.began;
      bar(pen, "wait", x(op.began), x(sent), row.get(op.node), LANE);
      bar(pen, op.kind, x(sent), x(op.began + op.took), row.get(op.node), LANE);
    }
    pen.restore();
    const messages = visible.filter((op) => op.kind === "send" && row.has(op.peer));
    if (messages.length < 1500)
      for (const op of messages) arrow(pen, x(op.began), row.get(op.node), x(op.met ?? op.began + op.took), row.get(op.peer));
  }

  function arrow(pen, x1, y1, x2, y2) {
    const down = y2 > y1;
    const [a, b] = [y1 + (down ? LANE : 0), y2 + (down ? 0 : LANE)];
    const angle = Math.atan2(b - a, x2 - x1);
    pen.strokeStyle = pen.fillStyle = ink("--ink");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x1, a);
    pen.lineTo(x2, b);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x2, b);
    for (const turn of [2.7, -2.7]) pen.lineTo(x2 + 6 * Math.cos(angle + turn), b + 6 * Math.sin(angle + turn));
    pen.fill();
  }

  // The whole run, and which part of it is looked at.
  function overview(width) {
    const lane = lanes.find((l) => l.t);
    const pen = prepared(mini, width, 22);
    if (!lane) return;
    const px = (t) => LEFT + (t / end) * (width - LEFT - 8);
    for (let p = LEFT; p < width - 8; p++) {
      const t = ((p - LEFT) / (width - LEFT - 8)) * end;
      const share = (totalAt(lane, 0, t + end / width) - totalAt(lane, 0, t)) / (end / width);
      pen.fillStyle = ink("--compute");
      pen.globalAlpha = 0.35;
      pen.fillRect(p, 20 - 18 * share, 1, 18 * share);
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = ink("--accent");
    pen.lineWidth = 2;
    pen.strokeRect(px(from), 1, Math.max(3, px(to) - px(from)), 20);
  }

  const timeAt = (event) => from + ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 8)) * (to - from);
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && document.activeElement !== canvas) return; // let the page scroll
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
    },
    { passive: false },
  );
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, from, to };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragged");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const gone = ((held.x - event.offsetX) / (canvas.clientWidth - LEFT - 8)) * (held.to - held.from);
    show(held.from + gone, held.to + gone);
  });
  for (const over of ["pointerup", "pointercancel"])
    canvas.addEventListener(over, () => {
      held = null;
      canvas.classList.remove("dragged");
    });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event)));
  mini.addEventListener("pointerdown", (event) => {
    const t = ((event.offsetX - LEFT) / (mini.clientWidth - LEFT - 8)) * end;
    show(t - (to - from) / 2, t + (to - from) / 2);
  });
  const pressed = {
    ArrowLeft: () => move(-0.2),
    ArrowRight: () => move(0.2),
    "+": () => zoom(0.6),
    "=": () => zoom(0.6),
    "-": () => zoom(1 / 0.6),
    0: () => show(0, end),
    Home: () => show(0, to - from),
    End: () => show(end - (to - from), end),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!pressed[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    pressed[event.key]();
  });

  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
  const buttons = el(
    "div",
    { class: "controls" },
    button("−", "zoom out", () => zoom(1 / 0.5)),
    button("+", "zoom in", () => zoom(0.5)),
    button("←", "earlier", () => move(-0.5)),
    button("→", "later", () => move(0.5)),
    button("A few steps", "zoom to a few steps", steps),
    button("All", "the whole run", () => show(0, end)),
  );
  const card = el(
    "figure",
    { class: "card" },
    el("figcaption", {}, el("h3", {}, "Timeline"), hint),
    legend,
    buttons,
    el("div", {}, canvas, mini),
    status,
  );
  card.redraw = paint;
  card.view = view;
  return card;
}

function opsOf({ node, kind, kinds, began, took, peer, met }) {
  return d3.range(node.length).map((i) => ({
    node: node[i],
    kind: kinds[kind[i]],
    began: began[i] / 1e6,
    took: took[i] / 1e6,
    peer: peer[i],
    met: met[i] == null ? null : met[i] / 1e6,
  }));
}

function within(ops, from, to) {
  return ops.filter((op) => op.began < to && op.began + op.took > from);
}

// Looked up once for each painting: there may be a million strokes.
function ink(name) {
  return (inks[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
}

function bar(pen, kind, a, b, y, height) {
  const left = Math.max(a, LEFT);
  const right = Math.min(b, pen.canvas.clientWidth - 8);
  if (right <= left) return;
  pen.fillStyle = ink(`--${kind}`);
  pen.fillRect(left, y, Math.max(right - left, 0.5), height);
}

function prepared(canvas, width, height) {
  const sharp = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(height * sharp);
  const pen = canvas.getContext("2d");
  pen.setTransform(sharp, 0, 0, sharp, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function axis(pen, x, from, to, width, height) {
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "center";
  for (const t of d3.ticks(from, to, Math.max(2, Math.floor(width / 150)))) {
    pen.fillStyle = ink("--line");
    pen.fillRect(x(t), TOP - 4, 1, height - TOP + 4);
    pen.fillStyle = ink("--soft");
    const at = Math.min(x(t), width - 30);
    if (at >= LEFT) pen.fillText(seconds(+t.toPrecision(12)), at, 14);
  }
  pen.textAlign = "left";
}

function name(pen, lanes, run) {
  pen.font = "12px system-ui, sans-serif";
  lanes.forEach((lane, i) => {
    pen.fillStyle = ink("--ink");
    pen.fillText(nameOf(run, lane.node), 8, TOP + GAP + i * (LANE + GAP) + LANE / 2 + 4);
  });
}
