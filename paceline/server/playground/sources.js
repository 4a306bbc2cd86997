// Who proposes tokens, each with a colour of its own that stays the same on the whole page: by-0, by-1, ... and by-target.
import { byId, make } from "./dom.js";

const NUM_COLOURS = 6;
export const TARGET = "target";
const known = [];

export function learn(names) {
  for (const name of names) if (name !== TARGET && !known.includes(name)) known.push(name);
  const items = [TARGET, ...known].map((name) => make("li", {}, make("span", { class: `swatch ${classOf(name)}`, "aria-hidden": "true" }), nameOf(name)));
  byId("legend").replaceChildren(...items);
}

export function classOf(source) {
  if (source === TARGET) return "by-target";
  if (!known.includes(source)) learn([source]);
  return `by-${known.indexOf(source) % NUM_COLOURS}`;
}

export function nameOf(source) {
  return source === TARGET ? "the model" : source;
}
