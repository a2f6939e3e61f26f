// SPDX-License-Identifier: Apache-2.0
// The same pages while runs go on: polls the server for new data, and keeps what the reader has chosen.

import { el, grid } from "./dom.js";
import { bytes, number, percent, seconds } from "./format.js";
import { go, parts, redraw } from "./main.js";
import { shown, loaded } from "./state.js";

const EVERY = 1000; // milliseconds
const OVER = ["done", "stopped", "failed", "died"];
const SAID = {
  done: "The run has ended.",
  stopped: "The run was stopped before its end.",
  failed: "The run failed.",
  died: "The run died.",
  silent: "The run has not written anything for a while.",
};
let version = 0; // of the report that is shown
let answered = null; // time of the last answer

// Strip: the state of the run, in a line that is always visible.

const state = el("strong", { role: "status", "aria-live": "polite" });
const figures = el("span");
const strip = el("div", { class: "wide live", id: "live" }, state, figures);

const going = (run) => !OVER.includes(run.state);

function say(runs, trouble) {
  const run = runs.find(going) ?? d3.greatest(runs, (r) => r.changed);
  if (!run) return;
  const several = runs.length > 1;
  strip.dataset.state = run.state.split(" ")[0];
  strip.dataset.step = run.step;
  const all = several && runs.every((r) => r.state === "done");
  write(state, all ? "All runs so far have ended." : (SAID[run.state] ?? run.state));
  const words = [
    several ? run.strategy : null,
    run.why,
    run.progress,
    `${number(run.t, 4)} ${run.virtual ? "virtual " : ""}s`,
    run.loss == null ? null : `loss ${number(run.loss, 4)} in the last step`,
    run.latest == null ? null : `${run.metric} ${number(run.latest, 4)}`,
    going(run) && run.rate ? `${number(run.rate)} samples/s` : null,
    run.left == null ? null : `${duration(run.left)} left`,
    trouble ? `figures below are older: ${trouble}` : null,
  ];
  write(figures, words.filter(Boolean).join(" · "));
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(s) {
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// Table of the nodes, on the page of the workers, while there is something to follow.

const now = el("div", { "data-live": "yes", id: "now" });
const KINDS = ["compute", "communicate", "wait"];
const HEAD = ["node", "step", "loss", "gradient age", ...KINDS, "samples/s", "traffic", "last event", "state"];

function line(node) {
  const known = node.rate != null; // figures of servers are known only at their end
  return [
    node.name,
    number(node.step),
    number(node.loss, 4),
    node.staleness == null ? "–" : node.staleness.toFixed(1),
    ...KINDS.map((kind) => (known ? percent(node[kind]) : "–")),
    number(node.rate),
    known ? `${bytes(node.traffic)}/s` : "–",
    node.seconds_since_event == null ? "–" : seconds(Math.round(node.seconds_since_event)),
    node.state,
  ];
}

function nodes(runs) {
  const run = runs.find((r) => r.nodes.length);
  now.hidden = !run;
  if (!run) return;
  const some = run.nodes.length < run.of ? ` The first ${run.nodes.length} of ${run.of} nodes.` : "";
  const fresh = el(
    "div",
    {},
    el("h2", {}, "Now"),
    el("p", { class: "note" }, `${run.name}: shares and rates over the last 32 steps of each.${some}`),
    grid(HEAD, run.nodes.map(line), { label: "Nodes now" }),
  );
  if (now.firstChild) morph(now.firstChild, fresh);
  else now.append(fresh);
}

// A new report in place of the old one. Unchanged parts stay, and figures draw themselves, so that no choice of the reader is lost.

function update(report) {
  const before = loaded.report.runs[shown.run]?.name;
  loaded.report = report;
  if (!(shown.metric in report.metrics)) shown.metric = report.metric;
  if (!report.conditions.includes(shown.condition)) shown.condition = report.conditions[0];
  shown.run = Math.max(
    0,
    report.runs.findIndex((run) => run.name === before),
  );
  const pages = document.querySelectorAll("main > section").length;
  const { words, bar, main } = parts(report);
  morph(document.getElementById("words"), words);
  morph(document.querySelector(".bar"), bar);
  morph(document.getElementById("main"), main);
  if (document.querySelectorAll("main > section").length !== pages) go();
  place();
  document.title = report.title;
  redraw();
}

function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) return void (old.data = fresh.data);
  const title = (card) => card.querySelector("h3")?.textContent;
  if (old.matches("figure.card")) return void (title(old) === title(fresh) || old.replaceWith(fresh));
  const [mine, theirs] = [[...old.childNodes].filter((child) => !child.dataset?.live), [...fresh.childNodes]];
  if (mine.length === theirs.length) return void mine.forEach((child, i) => morph(child, theirs[i]));
  for (const child of mine) child.remove();
  old.append(...theirs);
}

function place() {
  const workers = document.getElementById("workers");
  if (workers && workers.firstChild !== now) workers.prepend(now);
}

// Asking.

async function ask() {
  const { runs, version: newest, trouble } = await get("/since");
  answered = new Date();
  if (newest !== version) {
    update(await get("/report"));
    version = newest;
  }
  say(runs, trouble);
  nodes(runs);
}

class Unreachable extends Error {}

async function get(path) {
  const answer = await fetch(path).catch((error) => {
    throw new Unreachable(error.message);
  });
  if (!answer.ok) throw new Unreachable(`${answer.status}`);
  return answer.json();
}

async function follow() {
  try {
    if (!document.hidden) await ask();
  } catch (error) {
    strip.dataset.state = "gone";
    write(state, "No longer connected.");
    const until = answered ? answered.toLocaleTimeString() : "now";
    write(figures, `The figures are those of ${until}. Start orchestra watch again for more.`);
    if (!(error instanceof Unreachable)) console.error(error); // ours, not the network's
  }
  setTimeout(follow, strip.dataset.state === "gone" ? 5 * EVERY : EVERY);
}

function begin() {
  history.replaceState(null, "", `/${location.hash}`); // the token in the address was for one use
  document.querySelector(".bar").before(strip);
  document.querySelector("footer").textContent =
    `Neural Orchestra ${loaded.report.version}. This page is served by orchestra watch on this machine. ` +
    "Figures are drawn by Observable Plot and D3 (ISC licence).";
  place();
  follow();
}

const ready = new MutationObserver(() => {
  if (document.documentElement.dataset.ready !== "yes") return;
  ready.disconnect();
  begin();
});
ready.observe(document.documentElement, { attributes: true });
