// The tree of one pass as a drawing: what was drafted, what was kept, and the token that the model wrote itself.
// Invariant: the kept path is a straight line from the token before to the model's own; all that was dropped branches off from it.
// It grows to the right, or downward where the page is narrow.
import { draw } from "./dom.js";
import { TARGET, classOf } from "./sources.js";

const CHARACTER = 7.9; // pixels of one, in the drawing's font
const HEIGHT = 46;
const GAP = { along: 22, across: 12 };
const MOST_CHARACTERS = 14;
const MARKS = { accepted: "✓", rejected: "✗", "not reached": "·", own: "◆", before: "" };

/** own: the model's token, or null where the text ended within the draft; before: the token that the pass started from. */
export function treeOf(step, own, before, isDown) {
  const nodes = new Map([[0, { node: 0, fate: "before", text: before ?? "prompt", note: before === null ? "is read" : "so far" }]]);
  for (const each of step.draft) nodes.set(each.node, { ...each, note: noteOf(each) });
  if (own) {
    const last = step.draft.filter((each) => each.fate === "accepted").at(-1);
    nodes.set(TARGET, { ...own, node: TARGET, parent: last?.node ?? 0, fate: "own", note: noteOf({ ...own, fate: "own" }) });
  }
  const size = place(nodes, isDown);
  const all = [...nodes.values()];
  const edges = all.filter((each) => each.node !== 0).map((each) => edgeOf(nodes.get(each.parent), each, isDown));
  return draw("svg", { class: "tree", width: size.width, height: size.height, viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": inWords(all) },
    ...edges, ...all.map(nodeOf));
}

/** Depth along, branches across; a first child stays in its parent's line. */
function place(nodes, isDown) {
  const children = new Map([...nodes.keys()].map((key) => [key, []]));
  for (const each of nodes.values()) if (each.node !== 0) children.get(each.parent).push(each);
  const lines = { next: 0 };
  visit(nodes.get(0), 0, 0);
  const depths = Math.max(...[...nodes.values()].map((each) => each.depth)) + 1;
  const widest = (depth) => Math.max(...[...nodes.values()].filter((each) => depth === null || each.depth === depth).map((each) => each.width));
  const starts = [2];
  for (let depth = 0; depth < depths; depth += 1) starts.push(starts[depth] + (isDown ? HEIGHT : widest(depth)) + GAP.along * (isDown ? 0.7 : 1));
  const pitch = (isDown ? widest(null) : HEIGHT) + GAP.across;
  for (const each of nodes.values()) {
    const [along, across] = [starts[each.depth], 2 + each.line * pitch];
    [each.x, each.y] = isDown ? [across, along] : [along, across];
  }
  const [along, across] = [starts.at(-1) - GAP.along * (isDown ? 0.7 : 1) + 2, (lines.next + 1) * pitch - GAP.across + 4];
  return isDown ? { width: Math.ceil(across), height: Math.ceil(along) } : { width: Math.ceil(along), height: Math.ceil(across) };

  function visit(node, depth, line) {
    Object.assign(node, { depth, line, label: labelOf(node.text) });
    node.width = Math.max(58, Math.ceil(Math.max(node.label.length * CHARACTER, node.note.length * 6.2 + 16)) + 20);
    const order = children.get(node.node).sort((a, b) => rank(a) - rank(b));
    order.forEach((child, i) => visit(child, depth + 1, i === 0 ? line : ++lines.next));
  }
}

const rank = (node) => ({ accepted: 0, own: 1 })[node.fate] ?? 2;

function nodeOf(node) {
  const colour = node.source && node.fate !== "own" ? classOf(node.source) : "";
  return draw("g", { class: `node ${node.fate.replace(" ", "-")} ${colour}`, transform: `translate(${node.x} ${node.y})` },
    draw("title", {}, describe(node)),
    draw("rect", { width: node.width, height: HEIGHT - 2, rx: 8 }),
    draw("text", { class: "label", x: 10, y: 18 }, node.label),
    draw("text", { class: "note", x: 10, y: 35 }, MARKS[node.fate] && draw("tspan", { class: "mark" }, `${MARKS[node.fate]} `), node.note));
}

function edgeOf(from, to, isDown) {
  const start = isDown ? [from.x + 24, from.y + HEIGHT - 2] : [from.x + from.width, from.y + HEIGHT / 2];
  const end = isDown ? [to.x + 24, to.y] : [to.x, to.y + HEIGHT / 2];
  const bend = (isDown ? end[1] - start[1] : end[0] - start[0]) / 2;
  const [c1, c2] = isDown ? [[start[0], start[1] + bend], [end[0], end[1] - bend]] : [[start[0] + bend, start[1]], [end[0] - bend, end[1]]];
  const isKept = to.fate === "accepted" || to.fate === "own";
  return draw("path", { class: isKept ? "edge kept" : "edge", d: `M${start} C${c1} ${c2} ${end}` });
}

function noteOf(node) {
  if (isGiven(node.p)) return `p ${probability(node.p)}`;
  return isGiven(node.chance) ? percent(node.chance) : node.fate === "own" ? "the model" : node.source;
}

const isGiven = (value) => value !== null && value !== undefined;
const percent = (share) => `${Math.round(100 * share)} %`;

export function probability(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? value.toExponential(0) : value.toFixed(3);
}

function labelOf(text) {
  const seen = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return seen.length > MOST_CHARACTERS ? `${seen.slice(0, MOST_CHARACTERS - 1)}…` : seen;
}

const FATES = { accepted: "kept", rejected: "dropped", "not reached": "not reached", own: "written by the model", before: "before this pass" };

function describe(node) {
  const by = node.source && node.source !== TARGET ? `by ${node.source}` : null;
  const odds = isGiven(node.p) ? `p ${probability(node.p)}` : isGiven(node.chance) ? `guessed with ${percent(node.chance)}` : null;
  return [`“${node.text}” ${FATES[node.fate]}`, by, odds].filter(Boolean).join(", ");
}

function inWords(nodes) {
  return `Tree of this pass: ${nodes.map(describe).join("; ")}.`;
}
