// Short ways to make and find elements. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** make("p", {class: "note", title: "..."}, "text", child, ...): false and null attributes and children are left out. */
export function make(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for parts of a drawing. */
export function draw(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A token in quotes in which line ends are seen. */
export function quoted(text) {
  return `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")}”`;
}

/** What outlives the page. Storage may be forbidden; the page works without. */
export const store = {
  get: (name, fallback = null) => {
    try { return JSON.parse(localStorage.getItem(`paceline-${name}`)) ?? fallback; } catch { return fallback; }
  },
  set: (name, value) => {
    try { localStorage.setItem(`paceline-${name}`, JSON.stringify(value)); } catch { /* then for this page alone */ }
  },
};
