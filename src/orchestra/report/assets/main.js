// SPDX-License-Identifier: Apache-2.0
// The pages, put together.

import { lines, score, trainingLoss } from "./curves.js";
import { choices, el, grid, selection } from "./dom.js";
import { count, seconds } from "./format.js";
import { efficiency, heat, scaled, scaling } from "./conditions.js";
import { histogram, names, said } from "./consistency.js";
import { AXES, runs, shown, swatch, loaded, unpack } from "./state.js";
import { pareto, race } from "./race.js";
import { timeline } from "./timeline.js";
import { againstFormula, matrix, network } from "./traffic.js";
import { fairness, learned, results } from "./words.js";
import { breakdown, stepTimes, workerTimes } from "./workers.js";

// Pages.

function overview(report) {
  return [
    ...learned(report),
    el("div", { class: "controls" }, axisSwitch("overview"), conditionChoice("overview")),
    hero(report),
    results(report),
    fairness(report),
  ];
}

function hero(report) {
  if (!report.metric || !report.runs.some((run) => run.scores?.t.length > 1)) return lossFigure();
  return scoreFigure(report);
}

const seedsWords = () => {
  const seeds = new Set(runs().map((run) => run.seed)).size;
  return seeds > 1 ? `Median over ${seeds} seeds, single seeds as thin lines.` : "One seed.";
};

function scoreFigure(report) {
  return lines(
    "Test score",
    () => `The model's ${shown.metric} against ${AXES[shown.axis]}, evaluated off the clock. ${seedsWords()}`,
    score,
    {
      get name() {
        return shown.metric;
      },
      get target() {
        return report.target?.metric === shown.metric ? report.target.value : null;
      },
      nothing: "Nothing was scored.",
    },
  );
}

function lossFigure() {
  return lines(
    "Training loss",
    () => `Against ${AXES[shown.axis]}: means over a few steps of all workers, on a logarithmic scale. ${seedsWords()}`,
    trainingLoss,
    { name: "loss", log: true, nothing: "Nothing was trained: only time passed." },
  );
}

function compare(report) {
  return [
    el("div", { class: "controls" }, axisSwitch("compare"), metricChoice(report), conditionChoice("compare")),
    el("div", { class: "pair" }, scoreFigure(report), lossFigure()),
    el("div", { class: "pair" }, race(), pareto()),
  ];
}

function workers() {
  return [runChoice("workers"), breakdown(), el("div", { class: "pair" }, workerTimes(), stepTimes())];
}

function communication() {
  return [
    controls(conditionChoice("communication")),
    againstFormula(),
    runChoice("communication", (run) => run.lanes),
    el("div", { class: "pair" }, matrix(), network()),
  ];
}

function consistencyPage() {
  return [
    controls(conditionChoice("consistency")),
    el("div", { class: "pair" }, histogram("staleness"), histogram("gap")),
    ...names().map(said),
  ];
}

function conditionsPage() {
  return [heat(), scaled() ? el("div", { class: "pair" }, scaling(), efficiency()) : null];
}

function settingsPage(report) {
  const { equal, different, of } = report.settings;
  const copy = (text) =>
    el(
      "button",
      {
        type: "button",
        onclick: (event) => navigator.clipboard?.writeText(text).then(() => (event.target.textContent = "Copied")),
      },
      "Copy",
    );
  return [
    el("h2", {}, "To have it again"),
    ...(report.commands.length
      ? report.commands.map((text) =>
          el(
            "div",
            {},
            el(
              "pre",
              { tabindex: 0 },
              ...text.split(" ").flatMap((word, i) => [i ? " " : "", word.length < 30 ? el("span", {}, word) : word]),
            ),
            copy(text),
          ),
        )
      : [el("p", { class: "nothing" }, "These runs were not made on the command line: run your own script again.")]),
    el("h2", {}, "The same in all runs"),
    grid(["setting", "value"], Object.entries(equal), { left: true, label: "Settings that are the same in all runs" }),
    ...(different.length
      ? [
          el("h2", {}, "Different"),
          grid(
            ["run", ...different],
            report.runs.map((run, i) => [run.name, ...different.map((name) => of[i][name] ?? "–")]),
            { left: true, label: "Settings in which runs differ" },
          ),
        ]
      : []),
    ...(report.refused.length
      ? [
          el("h2", {}, "Not read"),
          grid(
            ["folder", "why"],
            report.refused.map((r) => [r.name, r.why]),
            { left: true },
          ),
        ]
      : []),
    el("p", { class: "note" }, `Made by orchestra ${report.version} from ${count(report.runs.length, "run")}.`),
  ];
}

// Controls. The same choice may be on several pages: all follow.

function controls(...items) {
  return items.some(Boolean) ? el("div", { class: "controls" }, ...items) : null;
}

function axisSwitch(page) {
  return choices(`axis-${page}`, "Against what", Object.entries(AXES), shown.axis, (axis) => {
    shown.axis = axis;
    for (const radio of document.querySelectorAll(".axis input, input[name^=axis-]"))
      radio.checked = radio.value === axis;
    redraw();
  });
}

function metricChoice(report) {
  const all = Object.keys(report.metrics);
  if (all.length < 2) return null;
  return selection(
    "metric",
    "Score",
    all.map((name) => [name, name]),
    shown.metric,
    (name) => {
      shown.metric = name;
      redraw();
    },
  );
}

function conditionChoice(page) {
  if (loaded.report.conditions.length < 2) return null;
  return selection(
    `condition-${page}`,
    "Condition",
    loaded.report.conditions.map((name) => [name, name]),
    shown.condition,
    (name) => {
      shown.condition = name;
      for (const other of document.querySelectorAll("select[id^=condition-]")) other.value = name;
      redraw();
    },
  );
}

function runChoice(page, fits = () => true) {
  const options = loaded.report.runs.flatMap((run, i) =>
    fits(run) ? [[i, `${run.strategy}${run.condition ? ` · ${run.condition}` : ""} · seed ${run.seed}`]] : [],
  );
  const list = selection(`run-${page}`, "Run", options, shown.run, (i) => {
    shown.run = +i;
    for (const other of document.querySelectorAll("select[id^=run-]"))
      if ([...other.options].some((o) => o.value === i)) other.value = i;
    redraw();
  });
  return el("div", { class: "controls" }, list);
}

function filters(report) {
  const box = ({ name }) => {
    const label = el(
      "label",
      { class: shown.off.has(name) ? "off" : null },
      el("input", {
        type: "checkbox",
        checked: !shown.off.has(name),
        value: name,
        onchange: (event) => {
          if (event.target.checked) shown.off.delete(name);
          else shown.off.add(name);
          label.classList.toggle("off", !event.target.checked);
          redraw();
        },
      }),
      swatch(name),
      name,
    );
    return label;
  };
  return el("fieldset", { class: "chips", "aria-label": "Strategies shown" }, ...report.strategies.map(box));
}

function themeButton() {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  let own = null;
  const apply = () => {
    const dark = own ?? preferred.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `switch to ${dark ? "light" : "dark"} colours`);
    redraw();
  };
  const button = el("button", {
    type: "button",
    id: "theme",
    onclick: () => {
      own = document.documentElement.dataset.theme !== "dark";
      apply();
    },
  });
  preferred.addEventListener("change", apply);
  queueMicrotask(apply);
  return button;
}

// The whole.

const PAGES = [
  ["overview", "Overview", overview, () => true],
  ["compare", "Compare", compare, () => true],
  ["workers", "Workers", workers, () => true],
  [
    "timeline",
    "Timeline",
    () => [runChoice("timeline", (run) => run.lanes), timeline()],
    (report) => report.runs.some((run) => run.lanes?.length),
  ],
  ["communication", "Communication", communication, () => true],
  ["consistency", "Consistency", consistencyPage, () => true],
  ["conditions", "Conditions", conditionsPage, (report) => report.conditions.length > 1],
  ["settings", "Settings", settingsPage, () => true],
];

export function redraw() {
  for (const card of document.querySelectorAll("section:not([hidden]) figure.card")) card.redraw?.();
}

export function go() {
  const wanted = location.hash.slice(1);
  const links = [...document.querySelectorAll("nav a")];
  const here = links.find((link) => link.hash === `#${wanted}`) ?? links[0];
  for (const link of links) {
    if (link === here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    document.getElementById(link.hash.slice(1)).hidden = link !== here;
  }
  // Not scrollIntoView: the Tab key would then go on from there.
  const nav = here.parentElement;
  nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.clientWidth) / 2;
  redraw();
}

// The address names the page that is shown, so it must not become that of the content.
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

// What is made from the report alone: the live page makes it again for each new report.
export function parts(report) {
  const pages = PAGES.filter(([, , , fits]) => fits(report));
  const nodes = report.runs.length === 1 ? seconds(report.runs[0].seconds) : `${count(report.runs.length, "run")}`;
  const virtual = report.virtual ? "simulated in virtual time" : null;
  const sub = [nodes, virtual, report.target ? `target ${report.target.text}` : null].filter(Boolean).join(" · ");
  return {
    words: el("div", { id: "words" }, el("h1", {}, report.title), el("p", { class: "sub" }, sub)),
    bar: el(
      "div",
      { class: "bar" },
      el(
        "div",
        { class: "wide" },
        el("nav", { "aria-label": "Pages" }, ...pages.map(([id, name]) => el("a", { href: `#${id}` }, name))),
        filters(report),
      ),
    ),
    main: el(
      "main",
      { class: "wide", id: "main", tabindex: -1 },
      ...pages.map(([id, name, make]) => el("section", { id, "aria-label": name, hidden: true }, ...make(report))),
    ),
  };
}

function build(report) {
  loaded.report = report;
  shown.metric = report.metric;
  shown.condition = d3.greatest(report.conditions, (name) => report.runs.filter((run) => run.condition === name).length);
  const fits = [(run) => run.trace, (run) => run.traffic?.flow.length, (run) => run.lanes, () => true];
  shown.run = fits.map((fit) => report.runs.findIndex(fit)).find((i) => i >= 0);
  const { words, bar, main } = parts(report);
  document.body.replaceChildren(
    el("a", { class: "skip", href: "#main", onclick: skip }, "To the content"),
    el("header", { class: "wide" }, el("div", { class: "top" }, words, themeButton())),
    bar,
    main,
    el(
      "footer",
      { class: "wide" },
      `Neural Orchestra ${report.version}. This file holds all its data and asks no network for anything. Figures are drawn by Observable Plot and D3 (ISC licence).`,
    ),
  );
  addEventListener("hashchange", () => {
    go();
    scrollTo(0, 0);
  });
  let width = 0;
  new ResizeObserver(() => {
    if (width === document.body.clientWidth) return;
    width = document.body.clientWidth;
    redraw();
  }).observe(document.body);
  go();
  document.documentElement.dataset.ready = "yes";
}

unpack()
  .then(build)
  .catch((error) => {
    document.body.replaceChildren(
      el(
        "p",
        { class: "verdict" },
        `This report cannot be shown: ${error.message}. It needs a browser of 2023 or later.`,
      ),
    );
    throw error;
  });
