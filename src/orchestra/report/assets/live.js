// SPDX-License-Identifier: Apache-2.0
// The same pages while runs go on: asks who served them what is new, and keeps what the reader has chosen.

import { el, grid } from "./dom.js";
import { bytes, number, percent, seconds } from "./format.js";
import { go, parts, redraw } from "./main.js";
import { shown, told } from "./state.js";

const EVERY = 1000; // milliseconds
const OVER = ["done", "stopped", "failed", "died"];
const SAID = {
  done: "The run has ended.", stopped: "The run was stopped before its end.", failed: "The run failed.",
  died: "The run is dead.", silent: "Nothing is heard of the run.",
};
let version = 0; // of the story that is shown
let heard = null; // when there was last an answer

// Strip: how it goes, in a line that is always in sight.

const state = el("strong", { role: "status", "aria-live": "polite" });
const figures = el("span");
const strip = el("div", { class: "wide live", id: "live" }, state, figures);

function say(runs, trouble) {
  const run = runs.find((r) => !OVER.includes(r.state)) ?? runs.reduce((a, b) => (b.changed > a.changed ? b : a), runs[0]);
  if (!run) return;
  const alone = runs.length === 1;
  strip.dataset.state = run.state.split(" ")[0];
  write(state, OVER.includes(run.state) && !alone && runs.every((r) => r.state === "done") ? "All runs have ended." : SAID[run.state] ?? run.state);
  const going = !OVER.includes(run.state);
  write(figures, [
    alone ? null : run.strategy, run.why, run.progress, `${number(run.t, 4)} ${run.virtual ? "virtual " : ""}s`,
    run.loss == null ? null : `loss ${number(run.loss, 4)}`,
    run.latest == null ? null : `${run.metric} ${number(run.latest, 4)}`,
    going && run.rate ? `${number(run.rate)} samples/s` : null,
    run.left == null ? null : `${duration(run.left)} left`,
    trouble ? `figures below are older: ${trouble}` : null,
  ].filter(Boolean).join(" · "));
  if (run.step != null) strip.dataset.step = run.step;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(s) {
  return s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
}

// Table of the nodes, on the page of the workers, while there is something to follow.

const now = el("div", { "data-live": "yes", id: "now" });

function nodes(runs) {
  const run = runs.find((r) => r.nodes?.length);
  now.hidden = !run;
  if (!run) return;
  const lines = run.nodes.map((n) => [n.name, number(n.step), number(n.loss, 4), n.staleness == null ? "–" : n.staleness.toFixed(1), ...["compute", "communicate", "wait"].map((kind) => (n.rate == null ? "–" : percent(n[kind]))), number(n.rate), n.traffic == null ? "–" : `${bytes(n.traffic)}/s`, n.heard == null ? "–" : seconds(Math.round(n.heard)), n.state]);
  const table = grid(["node", "step", "loss", "staleness", "compute", "communicate", "wait", "samples/s", "traffic", "last heard", "state"], lines, { label: "Nodes now" });
  const more = run.of > lines.length ? el("p", { class: "note" }, `The first ${lines.length} of ${run.of} nodes.`) : null;
  const [old] = now.getElementsByClassName("scroll");
  if (old) morph(old, table);
  else now.replaceChildren(el("h2", {}, "Now"), el("p", { class: "note" }, `${run.name}: shares and rates over the last 32 steps of each.`), table, ...(more ? [more] : []));
}

// A new story in place of the old one. What is the same stays, figures draw themselves, and so nothing that was chosen is lost.

function update(story) {
  const before = told.story.runs[shown.run]?.name;
  told.story = story;
  if (!(shown.metric in story.metrics)) shown.metric = story.metric;
  if (!story.conditions.includes(shown.condition)) shown.condition = story.conditions[0];
  shown.run = Math.max(0, story.runs.findIndex((run) => run.name === before));
  const pages = document.querySelectorAll("main > section").length;
  for (const fresh of Object.values(parts(story))) morph(standing(fresh), fresh);
  if (document.querySelectorAll("main > section").length !== pages) go();
  place();
  document.title = story.title;
  redraw();
}

function standing(fresh) {
  return fresh.id ? document.getElementById(fresh.id) : document.querySelector(`.${fresh.className}`);
}

function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) return void (old.data = fresh.data);
  const title = (card) => card.querySelector("h3")?.textContent;
  if (old.matches("figure.card")) return void (title(old) === title(fresh) || old.replaceWith(fresh));
  const [mine, theirs] = [[...old.childNodes].filter((child) => !child.dataset?.live), [...fresh.childNodes]];
  if (mine.length !== theirs.length) return replace(old, mine, theirs);
  mine.forEach((child, i) => morph(child, theirs[i]));
}

function replace(old, mine, theirs) {
  for (const child of mine) child.remove();
  old.append(...theirs);
}

function place() {
  const workers = document.getElementById("workers");
  if (workers && workers.firstChild !== now) workers.prepend(now);
}

// Asking.

async function ask() {
  const answer = await fetch(`/since?version=${version}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  const { runs, version: newest, trouble } = await answer.json();
  heard = new Date();
  if (newest !== version) {
    const story = await fetch("/story");
    if (!story.ok) throw new Error(`${story.status}`);
    update(await story.json());
    version = newest;
  }
  say(runs, trouble);
  nodes(runs);
}

async function follow() {
  try {
    if (!document.hidden) await ask();
  } catch (error) {
    if (!(error instanceof TypeError) && !/^\d+$/.test(error.message)) throw error; // ours, not the network's
    strip.dataset.state = "gone";
    write(state, "No longer connected.");
    write(figures, `What was told until ${heard ? heard.toLocaleTimeString() : "now"} is shown. Start orchestra watch again for more.`);
  }
  setTimeout(follow, strip.dataset.state === "gone" ? 5 * EVERY : EVERY);
}

function begin() {
  history.replaceState(null, "", `/${location.hash}`); // the token in the address was for one use
  document.querySelector(".bar").before(strip);
  document.querySelector("footer").textContent = `Neural Orchestra ${told.story.version}. This page is served by orchestra watch on this machine. Figures are drawn by Observable Plot and D3 (ISC licence).`;
  place();
  follow();
}

const ready = new MutationObserver(() => {
  if (document.documentElement.dataset.ready !== "yes") return;
  ready.disconnect();
  begin();
});
ready.observe(document.documentElement, { attributes: true });
