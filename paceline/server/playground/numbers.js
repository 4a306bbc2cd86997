// The figures of the answer being written: counted from its passes while it streams, the server's own at the end.
import { byId, make } from "./dom.js";
import { depthOf } from "./card.js";
import { plot } from "./plot.js";

const MOST_BARS = 12;
const SHORTEST_S = 0.1; // what took less has no speed worth telling: it came in one piece

export class Tally {
  constructor() {
    Object.assign(this, { steps: [], passes: 0, tokens: 0, drafted: 0, accepted: 0, draftedAt: [], acceptedAt: [], firstAt: null, firstTokens: 0, lastAt: null, final: null });
  }

  add(details, now = performance.now()) {
    for (const step of details?.steps ?? []) this._addStep(step);
    this.tokens += details?.tokens?.length ?? 0;
    if (this.firstAt === null && this.tokens > 0) Object.assign(this, { firstAt: now, firstTokens: this.tokens });
    this.lastAt = now;
  }

  _addStep(step) {
    this.steps.push(step);
    this.passes += 1;
    this.drafted += step.draft.length;
    this.accepted += step.accepted;
    const deepest = Math.max(0, ...step.draft.map((node) => depthOf(node, step.draft)));
    for (let depth = 0; depth < deepest; depth += 1) {
      this.draftedAt[depth] = (this.draftedAt[depth] ?? 0) + 1;
      this.acceptedAt[depth] = (this.acceptedAt[depth] ?? 0) + (depth < step.accepted ? 1 : 0);
    }
  }

  /** As it was after a number of passes. */
  after(passes) {
    const part = new Tally();
    for (const step of this.steps.slice(0, passes)) part._addStep(step);
    part.tokens = part.steps.reduce((sum, step) => sum + step.emitted, 0);
    return part;
  }

  finish(usage) {
    this.final = usage ?? null;
  }

  get tau() {
    return this.final?.speculative?.tau || (this.passes ? this.tokens / this.passes : null);
  }

  get alpha() {
    const said = this.final?.speculative;
    if (said) return said.num_drafted ? said.alpha : null;
    return this.drafted ? this.accepted / this.drafted : null;
  }

  get byPosition() {
    return this.final?.speculative?.acceptance_per_position ?? this.draftedAt.map((drafted, i) => this.acceptedAt[i] / drafted);
  }

  /** Tokens a second while decoding, after those of the first pass. */
  get speed() {
    const said = this.final?.timings?.tokens_per_second;
    if (said) return this.numTokens / said > SHORTEST_S ? said : null;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return this.firstAt !== null && seconds > SHORTEST_S ? (this.tokens - this.firstTokens) / seconds : null;
  }

  get numTokens() {
    return this.final?.completion_tokens ?? this.tokens;
  }

  get numPasses() {
    return this.final?.speculative?.num_steps ?? this.passes;
  }
}

export const shown = (value, digits, unit = "") => (value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits) + unit);

export function show(tally, speedup = null) {
  byId("tau").textContent = shown(tally.tau, 2);
  byId("alpha").textContent = shown(tally.alpha === null ? null : 100 * tally.alpha, 0, " %");
  byId("speed").textContent = shown(tally.speed, 1);
  byId("speedup").textContent = shown(speedup, 2, "×");
  showBars(tally.byPosition.slice(0, MOST_BARS));
  plot(tally.steps);
}

function showBars(shares) {
  const bars = byId("bars");
  byId("no-bars").hidden = shares.length > 0;
  bars.hidden = shares.length === 0;
  while (bars.children.length > shares.length) bars.lastChild.remove();
  shares.forEach((share, i) => {
    const item = bars.children[i] ?? bars.appendChild(make("li", {}, make("span", { class: "bar", "aria-hidden": "true" }), make("span", { class: "place" }, `${i + 1}`)));
    item.firstChild.style.setProperty("--share", share);
    item.title = `position ${i + 1}: ${Math.round(100 * share)} % kept`;
    item.setAttribute("aria-label", item.title);
  });
}
