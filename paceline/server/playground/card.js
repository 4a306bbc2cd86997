// The card beside a token: who proposed it, p and q, and what became of the draft of its pass.
// Opens on hover, on focus and on a tap; one at a time.
import { byId, make, quoted } from "./dom.js";
import { factsOf } from "./answer.js";
import { TARGET, classOf, nameOf } from "./sources.js";
import { probability } from "./tree.js";

const MARKS = { accepted: "✓", rejected: "✗", "not reached": "·" };
const MOST_ROWS = 14;
const RULES = {
  greedy: "greedy: the likeliest token is kept",
  coupled: "coupled: the seed decides, with or without drafts",
  deterministic: "drawn from p; a draft equal to it is kept",
  block: "kept with probability p/q, block by block",
  siblings: "kept with probability p/q, one sibling after another",
};
const card = byId("card");
let marked = [];

export function watch(talk) {
  talk.addEventListener("pointerover", (event) => event.pointerType === "mouse" && open(event.target));
  talk.addEventListener("pointerout", (event) => event.pointerType === "mouse" && !card.contains(event.relatedTarget) && close());
  talk.addEventListener("focusin", (event) => open(event.target));
  talk.addEventListener("focusout", close);
  talk.addEventListener("click", (event) => {
    open(event.target);
    const found = factsOf(event.target);
    if (found?.tokens.length) found.answer.onPass(found.tokens[0].step);
  });
  talk.addEventListener("keydown", walk);
  talk.addEventListener("scroll", close, { passive: true });
}

export function close() {
  card.hidden = true;
  for (const span of marked) span.classList.remove("same-pass", "chosen");
  marked = [];
}

export const isOpen = () => !card.hidden;

function open(span) {
  const found = factsOf(span);
  if (!found?.tokens.length) return;
  close();
  const step = found.answer.steps.get(found.tokens[0].step);
  card.replaceChildren(...found.tokens.map(tokenPart), step ? stepPart(step) : "");
  card.hidden = false;
  marked = found.answer.spansOfStep(found.tokens[0].step);
  for (const each of marked) each.classList.add("same-pass");
  span.classList.add("chosen");
  span.setAttribute("aria-describedby", "card");
  place(span);
}

function tokenPart(token) {
  const q = token.source === TARGET ? "not drafted" : token.q === null || token.q === undefined ? "1, not sampled" : probability(token.q);
  const figures = [["p, the model's", probability(token.p)], ["q, the drafter's", q]];
  return make("div", { class: "card-token" },
    make("p", { class: "card-word" }, make("span", { class: `token ${classOf(token.source)}` }, quoted(token.text)), make("small", {}, `id ${token.id}`)),
    make("p", {}, `proposed by ${nameOf(token.source)}`),
    token.p !== null && make("dl", {}, ...figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
}

function stepPart(step) {
  const drafted = step.draft.length;
  const kept = `${step.accepted} of ${drafted} drafted ${drafted === 1 ? "token" : "tokens"} kept`;
  const rows = step.draft.slice(0, MOST_ROWS).map((node) => draftRow(node, step.draft));
  if (drafted > MOST_ROWS) rows.push(make("li", {}, `and ${drafted - MOST_ROWS} more`));
  return make("div", { class: "card-pass" },
    make("p", {}, make("strong", {}, `Pass ${step.step}: `), drafted ? kept : "nothing was drafted",
      make("span", { class: "rule" }, RULES[step.rule] ?? step.rule ?? "")),
    drafted > 0 && make("ol", { class: "draft" }, ...rows));
}

function draftRow(node, nodes) {
  const row = make("li", { class: node.fate.replace(" ", "-") },
    make("span", { class: "mark", "aria-label": node.fate }, MARKS[node.fate] ?? "·"), make("code", {}, quoted(node.text)),
    make("small", {}, node.p === null || node.p === undefined ? node.fate : `p ${probability(node.p)}`));
  row.style.setProperty("--depth", depthOf(node, nodes) - 1);
  return row;
}

export function depthOf(node, nodes) {
  let depth = 1;
  const parents = new Map(nodes.map((each) => [each.node, each.parent]));
  for (let at = node.parent; at > 0 && depth <= nodes.length; at = parents.get(at)) depth += 1;
  return depth;
}

/** Under the token, or above it where there is no room. On a narrow page the style sheet docks it to the bottom instead. */
function place(span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const gap = 8;
  const left = Math.min(Math.max(gap, at.left), innerWidth - card.offsetWidth - gap);
  const below = at.bottom + gap;
  const top = below + card.offsetHeight > innerHeight ? Math.max(gap, at.top - card.offsetHeight - gap) : below;
  card.style.setProperty("--left", `${left}px`);
  card.style.setProperty("--top", `${top}px`);
}

/** Arrow keys: left and right by token, up and down by pass, Home and End. */
function walk(event) {
  const text = event.target.closest(".text");
  const spans = text ? [...text.querySelectorAll(".token[tabindex]")] : [];
  const here = spans.indexOf(event.target);
  const move = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: spans.length - 1, ArrowDown: pass(spans, here, 1), ArrowUp: pass(spans, here, -1) };
  const next = spans[Math.max(0, move[event.key])];
  if (!(event.key in move) || !next || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  next.focus();
}

function pass(spans, here, direction) {
  const stepOf = (i) => factsOf(spans[i])?.tokens[0].step;
  let i = Math.max(0, here);
  while (i + direction >= 0 && i + direction < spans.length && stepOf(i) === stepOf(here)) i += direction;
  return i;
}
