// One answer on the page: its text as spans, a span for each token, coloured by who proposed it.
// Invariant: what is shown is exactly the text the server settled on. Tokens only say where to cut it; a token that is part of a
// character ends up in one span with its neighbours, and text whose tokens are not known yet is shown uncoloured.
import { make } from "./dom.js";
import { classOf } from "./sources.js";

const BROKEN = "\ufffd"; // stands for a part of a character
const facts = new WeakMap(); // span -> {answer, tokens, index}

export const factsOf = (span) => facts.get(span);

export class Answer {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.steps = new Map(); // number -> step
    this.spans = [];
    this.onPass = () => {}; // the reader points at a pass
    this.tail = make("span", { class: "tail" });
    this.element = make("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Answer. Arrow keys walk through its tokens, up and down through its passes." }, this.tail);
    this._shown = 0; // characters that have a span
    this._next = 0; // first token without one
    this._waiting = []; // tokens that are parts of characters
  }

  get ids() {
    return this.tokens.map((token) => token.id);
  }

  add(text, details) {
    this.text += text ?? "";
    for (const token of details?.tokens ?? []) this.tokens.push(token);
    for (const step of details?.steps ?? []) this.steps.set(step.step, step);
    this._place(false);
  }

  finish() {
    this._place(true);
    const rest = this.text.slice(this._shown);
    if (rest) this._span(rest, this._waiting);
    this._waiting = [];
    this.tail.remove();
  }

  spansOfStep(number) {
    return this.spans.filter((span) => facts.get(span).tokens[0]?.step === number);
  }

  /** Marks the tokens of one pass; null: of none. */
  mark(number) {
    for (const span of this.element.querySelectorAll(".of-pass")) span.classList.remove("of-pass");
    for (const span of number === null ? [] : this.spansOfStep(number)) span.classList.add("of-pass");
  }

  /** Shows the first `count` tokens alone; all of them where it is not given. Their places do not change. */
  reveal(count = Infinity) {
    let seen = 0;
    for (const span of this.spans) {
      seen += facts.get(span).tokens.length;
      span.classList.toggle("later", seen > count);
    }
  }

  _place(isFinal) {
    while (this._next < this.tokens.length) {
      const token = this.tokens[this._next];
      const rest = this.text.slice(this._shown);
      const place = this._find(token, rest);
      if (place < 0 && !isFinal && isPerhapsLate(token, rest, this._waiting)) break;
      this._next += 1;
      if (place < 0) {
        this._waiting.push(token);
        continue;
      }
      if (place > 0) this._span(rest.slice(0, place), this._waiting);
      this._waiting = [];
      this._span(rest.slice(place).startsWith(token.text) ? token.text : token.text.trimStart(), [token]);
    }
    this.tail.textContent = this.text.slice(this._shown);
  }

  /** Where the token begins in the text that has no span yet; -1 if it is not there (yet). */
  _find(token, rest) {
    if (!token.text || token.text.includes(BROKEN)) return -1;
    if (this._waiting.length) return rest.indexOf(token.text);
    if (rest.startsWith(token.text)) return 0;
    const trimmed = token.text.trimStart(); // some models write a space before the first word, which the text does not have
    return this._next === 0 && trimmed && rest.startsWith(trimmed) ? 0 : -1;
  }

  _span(text, tokens) {
    if (!text) return;
    const source = tokens.at(-1)?.source;
    const span = make("span", { class: source ? `token ${classOf(source)}` : "token", tabindex: source ? "-1" : null }, text);
    facts.set(span, { answer: this, tokens: [...tokens], index: this.spans.length });
    this.spans.push(span);
    this.tail.before(span);
    this._shown += text.length;
  }
}

/** The server may hold text back: the end of it can be the beginning of a stop string or of a character. */
function isPerhapsLate(token, rest, waiting) {
  return token.text && !token.text.includes(BROKEN) && (waiting.length > 0 || token.text.startsWith(rest));
}
