// Short ways to make and find elements. Text is always set as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** make("p", {class: "note", title: "..."}, "text", child, ...): false and null children are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== false));
  return element;
}

/** A token in quotes in which spaces and line ends are seen. */
export function quoted(text) {
  return `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")}”`;
}
