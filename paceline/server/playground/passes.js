// An answer pass by pass: a slider through its passes, the tree of the one chosen, and the same in a sentence.
// While the answer is written the last pass is shown, until the reader chooses another.
import { byId, make, quoted, store } from "./dom.js";
import { TARGET } from "./sources.js";
import { treeOf } from "./tree.js";

const NARROW = matchMedia("(max-width: 34rem)");
const KEY = [["accepted", "✓ kept"], ["rejected", "✗ dropped"], ["not-reached", "· not reached"], ["own", "◆ the model's own"]];
let number = 0;

export class Passes {
  constructor(answer) {
    this.answer = answer;
    this.at = 0; // the pass shown; 0: none yet
    this._isFollowing = true;
    const id = `pass-${++number}`;
    this.slider = make("input", { type: "range", id, min: 1, max: 1, value: 1, step: 1, disabled: true });
    this.count = make("output", { for: id }, "–");
    this.words = make("p", { class: "pass-words" });
    this.box = make("div", { class: "tree-box", tabindex: "0", role: "group", "aria-label": "Tree of the pass; scrolls where it is wide" });
    const [back, on] = [["‹", "Previous pass", -1], ["›", "Next pass", 1]].map(([text, label, by]) => this._button(text, label, by));
    this.head = make("div", { class: "pass-head" }, make("label", { for: id }, "Pass"), back, this.slider, on, this.count);
    const summary = make("summary", {}, "Pass by pass", make("span", { class: "only-wide" }, ": what was drafted, kept and dropped"));
    const key = make("ul", { class: "tree-key", "aria-label": "Key" }, ...KEY.map(([fate, text]) => make("li", { class: fate }, text)),
      make("li", {}, "p: the model's probability"), make("li", {}, "%: the drafter's guess that all up to here is right"));
    this.element = make("details", { class: "passes", open: store.get("passes-open", true), hidden: true }, summary, this.head, this.words, this.box, key);
    summary.addEventListener("click", () => store.set("passes-open", !this.element.open)); // before it turns
    this.element.addEventListener("toggle", () => this._draw());
    this.slider.addEventListener("input", () => this.choose(Number(this.slider.value)));
    answer.onPass = (step) => this.choose(step);
    NARROW.addEventListener("change", () => this._draw());
  }

  _button(text, label, by) {
    const button = make("button", { type: "button", "aria-label": label, disabled: true }, text);
    button.addEventListener("click", () => this.choose(this.at + by));
    return button;
  }

  /** What has been written since: more passes. */
  grow() {
    const total = this.answer.steps.size;
    if (!total) return;
    this.element.hidden = false;
    this.slider.max = total;
    for (const control of this.head.querySelectorAll("input, button")) control.disabled = false;
    if (this._isFollowing) this._show(total);
    else this._count();
  }

  /** The answer is complete: the pass most worth seeing, one with something kept and something dropped. */
  finish() {
    this.grow();
    this.words.setAttribute("aria-live", "polite");
    if (this._isFollowing) this._show(mostTelling([...this.answer.steps.values()]) ?? this.answer.steps.size);
  }

  choose(step) {
    this._isFollowing = false;
    this._show(Math.min(Math.max(1, step), this.answer.steps.size));
  }

  _show(step) {
    if (!step) return;
    this.at = step;
    this.slider.value = step;
    this._count();
    this._draw();
  }

  _count() {
    this.count.textContent = `${this.at} of ${this.answer.steps.size}`;
    this.slider.setAttribute("aria-valuetext", `Pass ${this.count.textContent}`);
  }

  _draw() {
    const step = this.answer.steps.get(this.at);
    if (!step || !this.element.open || !this.element.isConnected) return this.answer.mark(null);
    const first = this.answer.tokens.findIndex((token) => token.step === this.at);
    const tokens = this.answer.tokens.filter((token) => token.step === this.at);
    const own = tokens.find((token) => token.source === TARGET) ?? null;
    const before = first > 0 ? this.answer.tokens[first - 1].text : null;
    this.words.textContent = sentence(step, own);
    this.box.replaceChildren(treeOf(step, own, before, NARROW.matches));
    this.answer.mark(this.at);
    return undefined;
  }
}

/** "eagle drafted 3 tokens: 2 kept, 1 dropped. The model wrote “ the” itself." */
function sentence(step, own) {
  const wrote = own ? `The model wrote ${quoted(own.text)} itself.` : "The text ended there.";
  const drafted = step.draft.length;
  if (!drafted) return `Nothing was drafted. ${wrote}`;
  const by = [...new Set(step.draft.map((node) => node.source))].join(" and ");
  const count = (fate) => step.draft.filter((node) => node.fate === fate).length;
  const fates = [["accepted", "kept"], ["rejected", "dropped"], ["not reached", "not reached"]].map(([fate, word]) => [count(fate), word]);
  const parts = fates.filter(([some]) => some).map(([some, word]) => `${some} ${word}`);
  return `${by} drafted ${drafted} ${drafted === 1 ? "token" : "tokens"}: ${parts.join(", ")}. ${wrote}`;
}

function mostTelling(steps) {
  const judged = (step) => step.draft.filter((node) => node.fate !== "not reached").length;
  const isMixed = (step) => step.accepted > 0 && judged(step) > step.accepted;
  const most = (some) => some.reduce((best, step) => (judged(step) > (best ? judged(best) : 0) ? step : best), null);
  return (most(steps.filter(isMixed)) ?? most(steps))?.step;
}

/** The pass of the latest answer, for the plot. */
export function choosePass(step) {
  const panel = [...byId("talk").querySelectorAll(".passes")].at(-1);
  const slider = panel?.querySelector("input");
  if (!slider || slider.disabled) return;
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
}
