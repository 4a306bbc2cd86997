// Plain decoding and drafts on the same message, side by side: the same text, and how much sooner.
// They run one after the other, not at once: sharing the machine would falsify both speeds. Drafts go first: some drafters remember
// what was written before, and a plain run of the same answer would be the best of hints.
import { make } from "./dom.js";
import { Turn } from "./turn.js";
import { shown } from "./numbers.js";
import * as controls from "./controls.js";

/** Writes both into `place`. Returns the drafted Turn and the speeds, or null when the user stopped it. */
export async function compare(place, body, signal, onChange) {
  const method = controls.speculative().method ?? "auto";
  const [plain, drafted] = [column("Plain decoding"), column(`With drafts: ${method}`)];
  const verdict = make("p", { class: "verdict", role: "status" }, "With drafts first …");
  place.append(make("div", { class: "columns" }, drafted.element, plain.element), verdict);
  const against = () => ratio(drafted.turn, plain.turn);
  const tell = () => onChange(drafted.turn, against());
  await run(drafted, { ...body, speculative: controls.speculative() }, signal, tell);
  if (signal.aborted) return stopped(verdict);
  verdict.textContent = "Now plainly …";
  await run(plain, { ...body, speculative: controls.speculative("off") }, signal, tell);
  if (signal.aborted) return stopped(verdict);
  judge(verdict, plain.turn, drafted.turn, against());
  return { turn: drafted.turn, plainSpeed: plain.turn.tally.speed };
}

function column(title) {
  const turn = new Turn();
  const note = make("p", { class: "summary" }, "waiting");
  return { turn, note, element: make("section", { class: "column", "aria-label": title }, make("h3", {}, title), turn.answer.element, note) };
}

async function run(column, body, signal, onChange) {
  column.element.classList.add("writing");
  try {
    await column.turn.write(body, signal, () => {
      column.note.textContent = column.turn.summary;
      onChange();
    });
  } finally {
    column.element.classList.remove("writing");
  }
}

function ratio(drafted, plain) {
  return drafted.tally.speed && plain.tally.speed ? drafted.tally.speed / plain.tally.speed : null;
}

function stopped(verdict) {
  verdict.textContent = "Stopped; there is nothing to compare.";
  return null;
}

/** Texts are compared in any case, token ids too where they were sent. */
function judge(verdict, plain, drafted, speedup) {
  const [a, b] = [plain.answer, drafted.answer];
  const isSame = a.text === b.text && a.ids.join() === b.ids.join();
  const rates = `${shown(drafted.tally.speed, 1)} against ${shown(plain.tally.speed, 1)} tokens/s`;
  verdict.classList.add(isSame ? "same" : "different");
  const equal = a.ids.length ? "The same text, token for token" : "The same text";
  verdict.replaceChildren(
    make("strong", {}, isSame ? `✓ ${equal}.` : `✗ The texts differ from character ${firstDifference(a.text, b.text) + 1} on.`),
    speedup ? ` ${shown(speedup, 2)}× the speed: ${rates}.` : " Too short to compare speeds.");
}

function firstDifference(a, b) {
  let i = 0;
  while (i < a.length && a[i] === b[i]) i += 1;
  return i;
}
