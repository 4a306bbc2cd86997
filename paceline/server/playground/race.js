// Plain decoding and drafts on the same message, side by side: the same text, and how much sooner.
// They run one after the other, not at once: sharing the machine would falsify both speeds. Drafts go first: some drafters remember
// what was written before, and a plain run of the same answer would be the best of hints. Then both are played again together,
// each token at the time it was measured to come.
import { make } from "./dom.js";
import { Turn } from "./turn.js";
import { shown } from "./numbers.js";
import * as controls from "./controls.js";

const TOGETHER_MS = 5; // tokens so near one another came as one piece
const SHORT_S = 3; // a race that is over sooner is played slowly
const SLOW = [2, 4, 8];
const ALONE = "Each ran alone, one after the other. The replay shows both at the measured times, counted from the first token; what arrived in one piece is spread over the time since the last.";

export class Race {
  constructor(place, body) {
    const asked = controls.speculative().method ?? "auto";
    const method = asked === "off" ? "auto" : asked; // a race needs drafts
    Object.assign(this, { body, method, drafted: new Lane("With drafts", method), plain: new Lane("Plain", "no drafts") });
    this.verdict = make("div", { class: "verdict" }, make("p", {}, "Measuring with drafts …"));
    this.actions = make("div", { class: "race-actions", hidden: true }, make("p", { class: "hint" }, ALONE));
    place.append(make("div", { class: "lanes" }, this.drafted.element, this.plain.element), this.verdict, this.actions, this.drafted.turn.passes.element);
  }

  get lanes() {
    return [this.drafted, this.plain];
  }

  get speedup() {
    const [fast, slow] = this.lanes.map((lane) => lane.turn.tally.speed);
    return fast && slow ? fast / slow : null;
  }

  get isSame() {
    const [a, b] = this.lanes.map((lane) => lane.turn.answer);
    return a.text === b.text && a.ids.join() === b.ids.join();
  }

  /** Both runs; false when the user stopped them. */
  async measure(signal, onChange) {
    for (const [lane, method, next] of [[this.drafted, this.method, "Measuring plain decoding …"], [this.plain, "off", ""]]) {
      try {
        await lane.run({ ...this.body, speculative: { ...controls.speculative(method), details: "drafts" } }, signal, onChange);
      } catch (error) {
        this.verdict.firstChild.textContent = "The race broke off.";
        throw error;
      }
      this.verdict.firstChild.textContent = signal.aborted ? "Stopped; there is nothing to compare." : next;
      if (signal.aborted) return false;
    }
    for (const lane of this.lanes) lane.learnTimes();
    return true;
  }

  /** How many times slower the first replay goes: a short race would be over before it was seen. */
  get slowness() {
    const seconds = Math.max(...this.lanes.map((lane) => lane.seconds));
    return seconds >= SHORT_S ? 1 : SLOW.find((times) => seconds * times >= SHORT_S) ?? SLOW.at(-1);
  }

  /** onChange(tally, speedup): of the lane with drafts, while it runs and at the end. */
  async replay(slowness, signal, onChange) {
    this.verdict.className = "verdict";
    this.verdict.replaceChildren(make("p", {}, slowness === 1 ? "Replay in real time …" : `Replay, ${slowness} times slower …`));
    const start = performance.now();
    const end = Math.max(...this.lanes.map((lane) => lane.seconds));
    for (let now = 0; now < end && !signal.aborted; now = (performance.now() - start) / 1000 / slowness) {
      const passes = this.drafted.passes;
      for (const lane of this.lanes) lane.showAt(now);
      if (this.drafted.passes !== passes || now === 0) onChange(this.drafted.turn.tally.after(this.drafted.passes));
      await new Promise(requestAnimationFrame);
    }
    for (const lane of this.lanes) lane.showAll();
    onChange(this.drafted.turn.tally, this.speedup);
    this.judge();
  }

  /** Texts are compared token by token. */
  judge() {
    const { isSame, speedup } = this;
    const [fast, slow] = this.lanes.map((lane) => shown(lane.turn.tally.speed, 1));
    const [a, b] = this.lanes.map((lane) => lane.turn.answer.text);
    this.verdict.className = `verdict ${isSame ? "same" : "different"}`;
    this.verdict.replaceChildren(
      speedup ? make("p", { class: "speedup" }, shown(speedup, 2, "×")) : null,
      make("p", {}, make("strong", {}, isSame ? "✓ Identical: the same text, token for token." : `✗ The texts differ from character ${firstDifference(a, b) + 1} on.`),
        make("span", { class: "rates" }, speedup ? `${fast} against ${slow} tokens/s` : "too short to compare speeds")));
    this.actions.hidden = false;
  }

  get summary() {
    return `${this.isSame ? "identical texts" : "the texts differ"}${this.speedup ? `, ${shown(this.speedup, 2)} times the speed` : ""}`;
  }

  /** onReplay(slowness) is called when the reader wants to see it again. */
  offerReplay(onReplay) {
    const slow = Math.max(SLOW[1], this.slowness);
    for (const [text, slowness] of [["Replay", 1], [`Slow motion, ${slow}×`, slow]].reverse()) {
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", () => onReplay(slowness));
      this.actions.prepend(button);
    }
  }
}

class Lane {
  constructor(title, note) {
    this.turn = new Turn();
    this.figures = Object.fromEntries(["tokens", "tokens/s", "passes", "τ"].map((name) => [name, make("dd", {}, "–")]));
    const counters = make("dl", { class: "counters" }, ...Object.entries(this.figures).map(([name, value]) => make("div", {}, make("dt", {}, name), value)));
    this.track = make("div", { class: "track", "aria-hidden": "true" }, make("span"));
    this.clock = make("span", { class: "clock" }, "waiting");
    this.element = make("section", { class: "lane", "aria-label": `${title}, ${note}` },
      make("div", { class: "lane-head" }, make("h3", {}, title, make("small", {}, note)), this.clock), this.track, counters, this.turn.answer.element);
    this.passes = 0;
    this.times = []; // of each token, in seconds since the first
  }

  get seconds() {
    return this.times.at(-1) ?? 0;
  }

  async run(body, signal, onChange) {
    this.element.classList.add("writing");
    this.clock.textContent = "measuring";
    try {
      await this.turn.write(body, signal, () => {
        this.showAll();
        onChange(this.turn);
      });
    } finally {
      this.element.classList.remove("writing");
      if (this.clock.textContent === "measuring") this.clock.textContent = "";
    }
  }

  learnTimes() {
    const tokens = this.turn.answer.tokens;
    for (let start = 0, end = 0, before = 0; start < tokens.length; start = end) {
      while (end < tokens.length && tokens[end].at - tokens[Math.max(start, end - 1)].at < TOGETHER_MS) end += 1;
      const now = (tokens[end - 1].at - tokens[0].at) / 1000;
      for (let i = start; i < end; i += 1) this.times.push(before + ((now - before) * (i + 1 - start)) / (end - start));
      before = now;
    }
    this.showAll();
  }

  /** As it was some seconds after the first token. */
  showAt(now) {
    let count = this.times.findIndex((time) => time > now);
    if (count < 0) return this.showAll();
    const tokens = this.turn.answer.tokens;
    count = Math.max(1, count);
    this.turn.answer.reveal(count);
    this.clock.textContent = `${now.toFixed(2)} s`;
    this.element.classList.remove("arrived");
    return this._count(count, tokens[count - 1].step, now > 0.02 ? (count - 1) / now : null, count / tokens.length);
  }

  showAll() {
    const { tally, answer } = this.turn;
    answer.reveal();
    this._count(tally.numTokens, tally.numPasses, tally.speed, this.times.length ? 1 : tally.numTokens / (Number(controls.sampling().max_tokens) || tally.numTokens));
    if (!this.times.length) return;
    this.clock.textContent = `${this.seconds.toFixed(2)} s`;
    this.element.classList.add("arrived");
  }

  _count(tokens, passes, speed, share) {
    this.passes = passes;
    const values = [`${tokens}`, shown(speed, 0), `${passes}`, shown(passes ? tokens / passes : null, 2)];
    Object.values(this.figures).forEach((element, i) => { element.textContent = values[i]; });
    this.track.firstChild.style.setProperty("--share", Math.min(1, share));
    const text = this.turn.answer.element;
    const last = text.querySelector(".token.later")?.offsetTop ?? text.scrollHeight;
    if (text.scrollHeight > text.clientHeight) text.scrollTop = last - text.clientHeight;
  }
}

function firstDifference(a, b) {
  let i = 0;
  while (i < a.length && a[i] === b[i]) i += 1;
  return i;
}
