// Passes of the answer as they come: what each one wrote and what it dropped, with the running τ and α.
// Bars are stacked: the model's own token, then kept drafts in their drafter's colour, then dropped ones as outlines.
import { byId, draw } from "./dom.js";
import { TARGET, classOf } from "./sources.js";

const MOST_PASSES = 72; // the last ones; more would be hairs
const EDGE = { left: 18, right: 6, top: 6, bottom: 6 };

let latest = [];

export function startPlot(onPass) {
  new ResizeObserver(() => plot(latest)).observe(byId("plot"));
  byId("plot").addEventListener("click", (event) => {
    const bar = event.target.closest("[data-pass]");
    if (bar) onPass(Number(bar.dataset.pass));
  });
}

/** steps: all of the answer. */
export function plot(steps) {
  latest = steps;
  const place = byId("plot");
  byId("no-plot").hidden = steps.length > 0;
  byId("plot-key").hidden = steps.length === 0;
  place.hidden = steps.length === 0;
  byId("plot-range").textContent = steps.length > MOST_PASSES ? `last ${MOST_PASSES} of ${steps.length} passes` : "";
  if (!steps.length) return;
  const [width, height] = [Math.max(200, place.clientWidth), Math.max(40, place.clientHeight)];
  const shown = steps.slice(-MOST_PASSES);
  const most = Math.max(4, ...shown.map((step) => step.draft.length + 1));
  const pitch = (width - EDGE.left - EDGE.right) / Math.max(24, shown.length);
  const scale = { x: (i) => EDGE.left + i * pitch, y: (value) => height - EDGE.bottom - (value / most) * (height - EDGE.top - EDGE.bottom), pitch };
  const running = averages(steps).slice(-MOST_PASSES);
  const lines = [["tau", (each) => scale.y(each.tau)], ["alpha", (each) => (each.alpha === null ? null : scale.y(each.alpha * most))]];
  place.replaceChildren(draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": inWords(steps, running.at(-1)) },
    ...axis(most, scale, width), ...shown.map((step, i) => bar(step, i, scale)), ...lines.map(([name, y]) => line(name, running, y, scale))));
}

function averages(steps) {
  const sum = { emitted: 0, drafted: 0, accepted: 0 };
  return steps.map((step, i) => {
    sum.emitted += step.emitted;
    sum.drafted += step.draft.length;
    sum.accepted += step.accepted;
    return { tau: sum.emitted / (i + 1), alpha: sum.drafted ? sum.accepted / sum.drafted : null };
  });
}

function axis(most, { y }, width) {
  return [0, most].flatMap((value) => [
    draw("path", { class: "grid", d: `M${EDGE.left} ${y(value)}H${width - EDGE.right}` }),
    draw("text", { class: "tick", x: EDGE.left - 4, y: y(value) + 3.5, "text-anchor": "end" }, `${value}`)]);
}

function bar(step, i, { x, y, pitch }) {
  const kept = step.draft.filter((node) => node.fate === "accepted");
  const isWhole = step.emitted > step.accepted; // else the text ended within the draft
  const parts = [...(isWhole ? [TARGET] : []), ...kept.map((node) => node.source)].map((source, level) => [`part ${classOf(source)}`, level, 1]);
  const dropped = step.draft.length - kept.length;
  if (dropped) parts.push(["part dropped", parts.length, dropped]);
  const box = ([name, level, count]) => draw("rect", {
    class: name, x: x(i) + 0.5, width: Math.max(1.5, pitch - 1.5), y: y(level + count) + 0.5, height: Math.max(1, y(level) - y(level + count) - 1) });
  return draw("g", { "data-pass": step.step },
    draw("title", {}, `Pass ${step.step}: ${step.emitted} written, ${kept.length} of ${step.draft.length} drafts kept`),
    draw("rect", { class: "target-area", x: x(i), width: pitch, y: EDGE.top, height: y(0) - EDGE.top }), ...parts.map(box));
}

function line(name, running, y, { x, pitch }) {
  const points = running.map((each, i) => [x(i) + pitch / 2, y(each)]).filter(([, value]) => value !== null);
  const d = points.length ? `M${points.map((point) => point.map((v) => v.toFixed(1)).join(" ")).join("L")}` : "";
  return draw("g", { class: "run" }, draw("path", { class: "halo", d }), draw("path", { class: name, d }));
}

function inWords(steps, last) {
  const alpha = last.alpha === null ? "nothing drafted" : `${Math.round(100 * last.alpha)} % of the drafts kept`;
  return `${steps.length} passes; on average ${last.tau.toFixed(2)} tokens a pass, ${alpha}.`;
}
