// The settings: what the form holds, as fields of a request. A field left empty is not sent, so the server's default stands.
// All but the key outlive the page; the key stays in the tab.
import { byId, store } from "./dom.js";
import { useKey, key } from "./api.js";
import { learn } from "./sources.js";

const NUMBERS = { "max-tokens": "max_tokens", seed: "seed", "top-k": "top_k", "min-p": "min_p", "repetition-penalty": "repetition_penalty" };
const form = byId("settings");
let offered = null;

export function start(onKey) {
  restore();
  form.addEventListener("input", showValues);
  form.addEventListener("change", keep);
  byId("settings-reset").addEventListener("click", reset);
  byId("key").value = key.get();
  byId("key").addEventListener("change", () => {
    useKey(byId("key").value);
    onKey();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("settings-open").addEventListener("click", () => openPanel());
  byId("settings-close").addEventListener("click", closePanel);
  showValues();
}

const kept = () => [...form.elements].filter((field) => field.id && field.id !== "key" && "value" in field && field.type !== "button");

function keep() {
  const values = Object.fromEntries(kept().map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]));
  if (isUncapped()) delete values.k; // as many as pay, whatever the server's most is
  store.set("settings", values);
}

function restore() {
  const values = store.get("settings", {});
  for (const field of kept()) {
    if (!(field.id in values)) continue;
    if (field.type === "checkbox") field.checked = values[field.id] === true;
    else field.value = values[field.id];
  }
}

function reset() {
  const key = byId("key").value;
  form.reset();
  byId("key").value = key;
  store.set("settings", {});
  offer(offered);
}

function showValues() {
  byId("temperature-shown").textContent = Number(byId("temperature").value) === 0 ? "0, greedy" : byId("temperature").value;
  byId("top-p-shown").textContent = byId("top-p").value;
  byId("k-shown").textContent = isUncapped() ? "as many as pay" : byId("k").value === "0" ? "none" : `at most ${byId("k").value}`;
}

function isUncapped() {
  return byId("k").value === byId("k").max;
}

/** What the server can draft with. */
export function offer(speculative) {
  offered = speculative;
  const saved = store.get("settings", {});
  const most = speculative?.num_speculative_tokens ?? 0;
  const drafters = speculative?.drafters ?? [];
  const names = speculative?.selectable ?? drafters;
  const choices = [["auto", "auto: as the server was started"], ...names.map((name) => [name, name]), ["off", "off: plain decoding"]];
  const before = saved.drafter ?? "auto";
  byId("drafter").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  byId("drafter").value = choices.some(([value]) => value === before) ? before : "auto";
  if (most > 0) Object.assign(byId("k"), { max: most, value: saved.k ?? most });
  byId("drafter").disabled = byId("k").disabled = most === 0;
  byId("drafting-note").hidden = most > 0;
  byId("drafting-note").textContent = most > 0 ? "" : "This server was started without drafts; start it with --speculative-config auto.";
  learn(drafters.filter((name) => name !== "hybrid")); // its tokens bear the names of those it asks
  showValues();
}

/** Opens the panel (a sheet on narrow pages) and puts the focus into a field. */
export function openPanel(id = "drafter") {
  document.body.classList.add("settings-shown");
  byId("settings-open").setAttribute("aria-expanded", "true");
  byId(id).focus();
}

export function closePanel() {
  if (!document.body.classList.contains("settings-shown")) return false;
  document.body.classList.remove("settings-shown");
  byId("settings-open").setAttribute("aria-expanded", "false");
  byId("settings-open").focus();
  return true;
}

/** False, with the browser's own words at the field, when a value cannot be used. */
export function isValid() {
  const wrong = form.querySelector(":invalid:not(fieldset)");
  if (!wrong) return true;
  wrong.closest("details")?.setAttribute("open", "");
  openPanel(wrong.id);
  return form.reportValidity();
}

export function sampling() {
  const fields = { temperature: Number(byId("temperature").value), top_p: Number(byId("top-p").value) };
  for (const [id, name] of Object.entries(NUMBERS)) if (byId(id).value !== "") fields[name] = Number(byId(id).value);
  if (byId("stop-text").value) fields.stop = [byId("stop-text").value];
  return fields;
}

/** The `speculative` field; `method` overrides the form's. */
export function speculative(method = byId("drafter").value) {
  const asked = { details: byId("watch").checked || "drafts" };
  if (method !== "auto") asked.method = method;
  if (method !== "off" && !isUncapped() && !byId("k").disabled) asked.num_speculative_tokens = Number(byId("k").value);
  return asked;
}

export function systemMessages() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}
