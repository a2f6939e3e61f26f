// SPDX-License-Identifier: Apache-2.0
// Elements from plain calls. Data only ever becomes text: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

// A table; cells are text or elements. All columns to the left, or the first few.
const kind = (cell) => (typeof cell === "string" && cell.length > 28 ? "long" : null); // words, not a figure

export function grid(head, lines, { left = 1, label = "" } = {}) {
  const table = el(
    "table",
    left === true ? { class: "left" } : {},
    el(
      "thead",
      {},
      el("tr", {}, ...head.map((text, i) => el("th", { scope: "col", class: i < left ? "name" : null }, text))),
    ),
    el(
      "tbody",
      {},
      ...lines.map((line) =>
        el("tr", {}, ...line.map((cell, i) => el("td", { class: i < left ? "name" : kind(cell) }, cell ?? "–"))),
      ),
    ),
  );
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label || "table" }, table);
}

// Choices of which one holds.
export function choices(name, legend, options, chosen, choose) {
  const radios = options.map(([value, text]) =>
    el(
      "label",
      {},
      el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => choose(value) }),
      text,
    ),
  );
  return el("fieldset", { class: "switch", role: "radiogroup", "aria-label": legend }, ...radios);
}

export function selection(id, legend, options, chosen, choose) {
  const list = el("select", { id, onchange: (event) => choose(event.target.value) });
  for (const [value, text] of options) list.append(el("option", { value, selected: `${value}` === `${chosen}` }, text));
  return el("label", { for: id }, `${legend} `, list);
}

// A figure: title, caption, drawing, and the same data as a table, for screen readers.
// `draw(width)` gives an element or null, `rows()` gives [head, lines].
export function figure(title, caption, draw, rows = null, nothing = "There is nothing to show here.") {
  const drawing = el("div", { class: "drawing" });
  const details = rows && el("details", {}, el("summary", {}, "The same as a table"));
  details?.addEventListener("toggle", () => {
    while (details.children.length > 1) details.lastChild.remove();
    if (details.open) details.append(grid(...rows(), { label: title }));
  });
  const words = el("p", { class: "caption" }, typeof caption === "function" ? "" : caption);
  const card = el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, title), words), drawing, details);
  card.redraw = () => {
    const width = Math.floor(drawing.clientWidth);
    if (!width) return; // on a page that is not shown
    const drawn = draw(width);
    drawing.replaceChildren(
      drawn ?? el("p", { class: "nothing" }, typeof nothing === "function" ? nothing() : nothing),
    );
    const picture = drawing.querySelector("svg");
    picture?.setAttribute("role", "img");
    picture?.setAttribute("aria-label", `${title}. ${rows ? "The same follows as a table." : ""}`);
    if (typeof caption === "function") words.textContent = caption();
    if (details) {
      details.hidden = !drawn;
      if (details.open) details.dispatchEvent(new Event("toggle"));
    }
  };
  return card;
}

export function keys(entries) {
  return el(
    "div",
    { class: "keys" },
    ...entries.map(([text, colour]) => el("span", { style: `--key: ${colour}` }, text)),
  );
}
