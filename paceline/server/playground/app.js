// The playground: a conversation, one request at a time. Everything else is in the modules it imports.
import { byId, make } from "./dom.js";
import { ApiError, getJson, readiness, useKey } from "./api.js";
import * as card from "./card.js";
import * as controls from "./controls.js";
import { Tally, show } from "./numbers.js";
import { choosePass } from "./passes.js";
import { startPlot } from "./plot.js";
import { Race } from "./race.js";
import { Turn } from "./turn.js";

const POLL_MS = 2000;
const GAP = 16; // pixels above a race
const SHORT = 80;
const NEAR_END = 60; // pixels: a reader so near the end wants to see what comes
const TOUCH = matchMedia("(pointer: coarse)"); // a focus there would bring up the keyboard
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const talk = byId("talk");
const prompt = byId("prompt");
const state = { model: null, messages: [], running: null, isFollowing: true };

async function connect() {
  const ready = await readiness();
  if (ready?.isReady) {
    await learnModel();
    return;
  }
  tellServer("waiting", ready ? `the engine is ${ready.status}` : "no server answers");
  setTimeout(connect, POLL_MS);
}

async function learnModel() {
  try {
    const model = (await getJson("/v1/models")).data[0];
    state.model = model.id;
    controls.offer(model.speculative);
    tellServer("ready", model.id);
  } catch (error) {
    tellServer("waiting", error.status === 401 ? "needs an API key" : error.message);
    if (error.status === 401) controls.openPanel("key");
  }
}

function tellServer(status, text) {
  byId("server").dataset.status = status;
  byId("server-text").textContent = text;
}

function begin(text) {
  byId("welcome").hidden = true;
  for (const panel of talk.querySelectorAll(".passes")) panel.open = false; // the new answer's is the one to look at
  state.running = new AbortController();
  setRunning(true);
  const place = make("article", { class: "turn model", "aria-label": "Answer" });
  const asked = make("article", { class: "turn user", "aria-label": "You" }, make("p", {}, text));
  talk.append(asked, place);
  state.isFollowing = true;
  follow();
  return { place, asked };
}

function setRunning(isRunning) {
  byId("send").disabled = byId("race").disabled = isRunning;
  for (const button of talk.querySelectorAll(".race-actions button")) button.disabled = isRunning;
  byId("stop").hidden = !isRunning;
  talk.setAttribute("aria-busy", String(isRunning));
  if (!isRunning) state.running = null;
}

/** The end of what is written; of a race its beginning, where the counters are, and the question if it is short. */
function follow() {
  if (!state.isFollowing) return;
  const race = talk.querySelector(".turn.race:last-child");
  const asked = race?.previousElementSibling;
  const top = asked && asked.offsetHeight < SHORT ? asked : race;
  talk.scrollTop = top ? top.offsetTop - talk.offsetTop - GAP : talk.scrollHeight;
}

async function submit(isRace) {
  const text = prompt.value.trim();
  if (!text) prompt.focus();
  if (state.running || !text || !controls.isValid()) return;
  prompt.value = "";
  grow();
  await say(text, isRace);
}

async function say(text, isRace) {
  const { place, asked } = begin(text);
  show(new Tally());
  const messages = [...state.messages, { role: "user", content: text }];
  try {
    const turn = await (isRace ? sayTwice : sayOnce)(place, messages);
    if (turn?.answer.text && place.isConnected) state.messages = [...messages, { role: "assistant", content: turn.answer.text }];
    byId("news").textContent = turn ? `Answer complete: ${turn.race?.summary ?? turn.summary}` : "Stopped";
  } catch (error) {
    if (!(error instanceof ApiError)) console.error(error);
    fail(place, error, () => { asked.remove(); place.remove(); say(text, isRace); });
  } finally {
    setRunning(false);
    follow();
    if (!document.body.classList.contains("settings-shown") && !TOUCH.matches) prompt.focus({ preventScroll: true });
  }
}

function request(messages) {
  return {
    model: state.model ?? "default", messages: [...controls.systemMessages(), ...messages], stream: true, stream_options: { include_usage: true },
    ...controls.sampling(),
  };
}

async function sayOnce(place, messages) {
  const turn = new Turn();
  const note = make("p", { class: "summary" });
  place.append(turn.answer.element, note, turn.passes.element);
  place.classList.add("writing");
  try {
    await turn.write({ ...request(messages), speculative: controls.speculative() }, state.running.signal, () => {
      note.textContent = turn.summary;
      show(turn.tally);
      follow();
    });
  } finally {
    place.classList.remove("writing");
  }
  return turn;
}

async function sayTwice(place, messages) {
  const body = request(messages);
  if (body.temperature > 0 && body.seed === undefined) { // chance would make the texts differ, so both get the same
    body.seed = crypto.getRandomValues(new Uint32Array(1))[0];
    place.append(make("p", { class: "summary" }, `Both with seed ${body.seed}`));
  }
  place.classList.add("race");
  const race = new Race(place, body);
  byId("news").textContent = "Racing: first with drafts, then plain";
  const isWhole = await race.measure(state.running.signal, () => {
    show(race.drafted.turn.tally, race.speedup);
    follow();
  });
  if (!isWhole) return null;
  race.offerReplay((slowness) => playAgain(race, slowness));
  if (STILL.matches) race.judge();
  else await race.replay(race.slowness, state.running.signal, show);
  return Object.assign(race.drafted.turn, { race });
}

async function playAgain(race, slowness) {
  if (state.running) return;
  state.isFollowing = true;
  state.running = new AbortController();
  setRunning(true);
  await race.replay(slowness, state.running.signal, show);
  setRunning(false);
  byId("news").textContent = `Replay over: ${race.summary}`;
}

function fail(place, error, again) {
  const words = error instanceof ApiError ? error.message : "Something went wrong on this page; the browser's console says more.";
  const retry = make("button", { type: "button" }, "Try again");
  retry.addEventListener("click", again);
  place.append(make("div", { class: "error", role: "alert" }, make("p", {}, words), retry));
  if (error.status === 401) controls.openPanel("key");
  if (error.status === 0 || error.status === 503) connect();
}

function startOver() {
  state.running?.abort();
  state.messages = [];
  for (const turn of talk.querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
  show(new Tally());
  prompt.focus();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 3)}px`;
}

function onKey(event) {
  if (event.key === "Escape") {
    if (byId("keys").open) return; // it closes itself
    if (state.running) state.running.abort();
    else if (card.isOpen()) card.close();
    else controls.closePanel();
  }
}

function start() {
  controls.start(connect);
  useKey(byId("key").value);
  card.watch(talk);
  startPlot(choosePass);
  byId("keys-open").addEventListener("click", () => byId("keys").showModal());
  byId("keys-close").addEventListener("click", () => byId("keys").close());
  talk.addEventListener("scroll", () => { state.isFollowing = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_END; }, { passive: true });
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(false); });
  byId("race").addEventListener("click", () => submit(true));
  byId("stop").addEventListener("click", () => state.running?.abort());
  byId("new-chat").addEventListener("click", startOver);
  byId("examples").addEventListener("click", (event) => {
    if (event.target.tagName !== "BUTTON") return;
    prompt.value = event.target.textContent;
    grow();
    prompt.focus();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit(event.ctrlKey || event.metaKey);
  });
  document.addEventListener("keydown", onKey);
  connect();
}

start();
