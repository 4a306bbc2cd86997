// One answer from request to end: streams it into an Answer and a Tally.
// What arrives is drawn in batches: drawing every token by itself would take the engine's cores where both share a machine.
import { events } from "./api.js";
import { Answer } from "./answer.js";
import { Passes } from "./passes.js";
import { Tally, shown } from "./numbers.js";

const DRAW_MS = 100;
const ENDS = { length: "reached max tokens", stop: "", content_filter: "filtered", tool_calls: "called a tool" };

/** The text of a piece: what a model thinks is shown before what it answers. */
const said = (delta) => (delta?.reasoning_content ?? "") + (delta?.content ?? "");

export class Turn {
  constructor() {
    this.answer = new Answer();
    this.passes = new Passes(this.answer);
    this.tally = new Tally();
    this.end = null; // the server's finish_reason, or "stopped"
    this._undrawn = [];
  }

  /** Writes until the end or until `signal` says stop; throws what the server or the network did wrong, keeping what was written. */
  async write(body, signal, onChange) {
    const drawing = setInterval(() => this._draw() && onChange(this), DRAW_MS);
    try {
      for await (const event of events("/v1/chat/completions", body, signal)) this._take(event);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      this.end = "stopped";
    } finally {
      clearInterval(drawing);
      this._draw();
      this.answer.finish();
      this.passes.finish();
      onChange(this);
    }
  }

  _take(event) {
    const choice = event.choices?.[0];
    if (choice) {
      this._undrawn.push(choice);
      const now = performance.now();
      for (const token of choice.speculative?.tokens ?? []) token.at = now;
      this.tally.add(choice.speculative, now);
      this.end = choice.finish_reason ?? this.end;
    }
    if (event.usage) this.tally.finish(event.usage);
  }

  _draw() {
    const chunks = this._undrawn.splice(0);
    for (const chunk of chunks) this.answer.add(said(chunk.delta), chunk.speculative);
    if (chunks.length) this.passes.grow();
    return chunks.length > 0;
  }

  /** "128 tokens in 61 passes · 143.2 tokens/s" */
  get summary() {
    const passes = this.tally.numPasses;
    const parts = [`${this.tally.numTokens} tokens${passes ? ` in ${passes} passes` : ""}`];
    if (this.tally.speed) parts.push(`${shown(this.tally.speed, 1)} tokens/s`);
    const end = this.end === "stopped" ? "stopped by you" : ENDS[this.end] ?? this.end;
    return [...parts, end].filter(Boolean).join(" · ");
  }
}
