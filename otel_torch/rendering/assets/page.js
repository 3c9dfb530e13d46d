// What all scripts of a page share: elements, colors, numbers as text, and the tooltip.

const data = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

// Make an element. Texts are text: a name never becomes markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null) continue;
    made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// A color of the page's style, such as "--ink".
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A number as people read it; Infinity stands for NaN and Inf.
function numberText(value) {
  if (Number.isNaN(value)) return "none";
  return Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "NaN or Inf";
}

function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16;
  const fits = below + tip.offsetHeight <= innerHeight;
  tip.style.left = `${Math.max(x, 8)}px`;
  tip.style.top = `${Math.max(fits ? below : event.clientY - tip.offsetHeight - 10, 8)}px`;
}

// Call `draw` now, whenever the width of the host changes, and when the colors do.
function redrawn(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    if (width) draw();
  }).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => width && draw());
}

// A canvas as sharp as the screen. Returns its context, scaled to CSS pixels.
function sizedContext(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
