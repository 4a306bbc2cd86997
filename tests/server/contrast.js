// Every text on the page whose contrast with what lies under it is less than 4.5, by WCAG's formula. Controls that are switched off are left out.
const numbers = (colour) => colour.match(/[\d.]+(e-?\d+)?/g).map(Number);
function parsed(colour) {
  if (colour.startsWith("color(")) { const [r, g, b, a = 1] = numbers(colour.replace("srgb", "")); return [r, g, b, a]; }
  const [r, g, b, a = 1] = numbers(colour);
  return [r / 255, g / 255, b / 255, a];
}
const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
function ground(element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const rect = at.matches(".node, .node *") ? at.closest(".node").querySelector("rect") : null;
    if (rect && !at.matches(".node")) layers.push(getComputedStyle(rect).fill);
    else if (!(at instanceof SVGElement)) layers.push(getComputedStyle(at).backgroundColor);
  }
  return layers.reverse().map(parsed).reduce((under, top) => over(top, under), [1, 1, 1, 1]);
}
const light = (colour) => colour.slice(0, 3).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const faint = [];
for (const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); walker.nextNode();) {
  const text = walker.currentNode.textContent.trim();
  const element = walker.currentNode.parentElement;
  if (!text || element.closest("title, option, script, noscript, :disabled, .unseen") || !element.checkVisibility({ visibilityProperty: true })) continue;
  const style = getComputedStyle(element);
  const under = ground(element);
  const ink = over(parsed(element instanceof SVGElement ? style.fill : style.color), under);
  const [a, b] = [light(ink), light(under)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) faint.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return faint;
