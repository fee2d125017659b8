// The sliders: table, map and sentence follow the SLO. What they show is looked up in a lattice that
// reports/answers/slo_sliders.py computed.
"use strict";
const lattice = JSON.parse(document.getElementById("lattice").textContent);
const knobs = ["ttft", "tpot", "target"];
const input = Object.fromEntries(knobs.map((name) => [name, document.getElementById(name)]));
document.documentElement.classList.add("scripted");

// What the sliders change, as the page was written, to be put back.
const original = new Map();
for (const element of document.querySelectorAll("#answers [data-cell], #headline, .basis, #map [data-bar]"))
  original.set(element, { html: element.innerHTML, x: element.getAttribute("x"), width: element.getAttribute("width") });

// A rate in the same words as models/formatting.py writes it: with two significant digits.
function rate(value, entry, rounded = Math.round) {
  if (value === null) return "not known";
  if (value === 0) return "none";
  const [seconds, unit] = entry.unit;
  const scaled = value * seconds;
  const exponent = Math.floor(Math.log10(scaled)); // 1.8 -> 0, 34 -> 1
  const tolerance = rounded === Math.floor ? 1e-9 : 0; // floating point may have made a whole number a little smaller
  if (scaled >= 100) {
    const step = 10 ** (exponent - 1);
    return Math.round(rounded(scaled / step + tolerance) * step).toLocaleString("en") + unit;
  }
  const decimals = Math.min(Math.max(0, 1 - exponent), 6);
  const factor = 10 ** decimals;
  return (rounded(scaled * factor + tolerance) / factor).toFixed(decimals) + unit;
}
function inSeconds(value) { return value < 1 ? `${Math.round(value * 1000)} ms` : `${value} s`; }

function answerOf(entry) { // the lattice's answer for one model on one device, under the SLO of the sliders
  const [i, j, k] = knobs.map((name) => Number(input[name].value));
  const point = (i * lattice.tpot.length + j) * lattice.target.length + k;
  return Object.fromEntries(Object.entries(entry.answers).map(([name, values]) => [name, values[point]]));
}
const isSloOfRun = () => knobs.every((name) => Number(input[name].value) === lattice.run[name]);
const valueInWords = (name) => document.getElementById(`${name}-says`).textContent;

function pixelsOf(svg, value) {
  const { low, high, left, right } = svg.dataset;
  const fraction = Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low);
  return Number(left) + fraction * (right - left);
}
function barOf(svg, entry, kind) {
  return svg.querySelector(`[data-model="${entry.model}"][data-side="${entry.side}"][data-bar="${kind}"]`);
}
function moveBar(svg, entry, kind, from, to) {
  const bar = barOf(svg, entry, kind);
  if (bar) { bar.setAttribute("x", from); bar.setAttribute("width", Math.max(0, to - from)); }
}
function moveBars(svg, entry, answer) {
  const left = Number(svg.dataset.left);
  const confirmedEnd = answer.confirmed ? pixelsOf(svg, answer.confirmed) : left;
  const estimatedEnd = answer.estimated ? Math.max(confirmedEnd, pixelsOf(svg, answer.estimated)) : confirmedEnd;
  moveBar(svg, entry, "confirmed", left, confirmedEnd);
  moveBar(svg, entry, "estimated", confirmedEnd, estimatedEnd);
  const gpuBar = barOf(svg, entry, "takeover");
  if (gpuBar) {
    const { x, width } = original.get(gpuBar);
    moveBar(svg, entry, "takeover", estimatedEnd, Number(x) + Number(width));
  }
}
function writeRow(entry, answer) {
  const cellOf = (key) => document.querySelector(`#answers [data-model="${entry.model}"][data-cell="${key}"]`);
  const write = (key, text, grade) => {
    cellOf(key).innerHTML = `<span class="v"></span>` + (grade ? ` <i class="grade ${grade}">${grade}</i>` : "");
    cellOf(key).firstChild.textContent = text;
  };
  cellOf(`${entry.side}-single_stream`).querySelector(".v").textContent = entry.single_stream + (answer.meets_unloaded ? ": met" : ": missed");
  const confirmed = answer.confirmed ? rate(answer.confirmed, entry, Math.floor) : "none confirmed";
  write(`${entry.side}-confirmed`, answer.meets_unloaded ? confirmed : "misses the SLO unloaded", answer.meets_unloaded && answer.confirmed && "confirmed");
  write(`${entry.side}-estimated`, answer.estimated ? rate(answer.estimated, entry) : "–", answer.estimated && "estimated");
  if (cellOf("takeover")) {
    const gpu = entry.gpus[answer.takeover] || null;
    write("takeover", gpu ? `${gpu.name}, ${gpu.price}` : "see the SLO of the run", gpu && "predicted");
  }
}
function sentence(side, largestServed, nextLarger) {
  const device = { cpu: "the CPU", gpu: "this machine's GPU" }[side];
  if (!largestServed) return `${device} serves none of these models`;
  const { entry, answer } = largestServed;
  const served = answer.confirmed ? `${rate(answer.confirmed, entry, Math.floor)} confirmed` : `about ${rate(answer.estimated, entry)}, estimated`;
  const needsGpu = nextLarger && lattice.sides.length === 1 && side === "cpu";
  return `${device} serves up to ${entry.title} (${served})` + (needsGpu ? `; from ${nextLarger.title} on a GPU takes over` : "");
}
function restore() {
  for (const [element, { html, x, width }] of original) {
    element.innerHTML = html;
    if (x !== null) { element.setAttribute("x", x); element.setAttribute("width", width); }
    // These are known under the SLO of the run only.
    if (["interval", "name", "forecast"].includes(element.dataset.bar)) element.style.display = isSloOfRun() ? "" : "none";
  }
  for (const element of document.querySelectorAll(".reuse")) element.style.display = isSloOfRun() ? "" : "none";
}
function show() {
  for (const name of knobs) {
    const value = lattice[name][Number(input[name].value)];
    document.getElementById(`${name}-says`).textContent = name === "target" ? `${Math.round(value * 1000) / 10} %` : inSeconds(value);
  }
  restore();
  const status = document.getElementById("moved");
  if (isSloOfRun()) {
    status.textContent = "This is the SLO of the run.";
    if (location.hash) history.replaceState(null, "", location.pathname + location.search);
    return;
  }
  const basis = document.querySelector(".basis");
  const slo = `first token within ${valueInWords("ttft")}, then ${valueInWords("tpot")} a token, for ${valueInWords("target")} of requests`;
  basis.textContent = basis.textContent.replace(/SLO: .* of requests/, `SLO moved to: ${slo}`);
  const largestServed = {}, nextLarger = {}; // by device
  for (const entry of lattice.entries) {
    const answer = answerOf(entry);
    writeRow(entry, answer);
    for (const svg of document.querySelectorAll("#map svg")) moveBars(svg, entry, answer); // for a page, for a phone
    if (answer.estimated || answer.confirmed) {
      largestServed[entry.side] = { entry, answer };
      nextLarger[entry.side] = null;
    } else nextLarger[entry.side] ||= entry;
  }
  const sentences = lattice.sides.map((side) => sentence(side, largestServed[side], nextLarger[side]));
  document.getElementById("headline").textContent = `Under this SLO ${sentences.join("; ")}.`;
  status.textContent = "Confirmed: from the measured levels. Estimated: the same simulation, under this SLO.";
  history.replaceState(null, "", "#" + knobs.map((name) => `${name}=${lattice[name][Number(input[name].value)]}`).join("&"));
}
function readAddress() { // the sliders' values after the # of the URL
  const values = new URLSearchParams(location.hash.slice(1));
  for (const name of knobs) {
    const index = lattice[name].indexOf(Number(values.get(name)));
    input[name].max = lattice[name].length - 1;
    input[name].value = values.has(name) && index >= 0 ? index : lattice.run[name];
  }
  show();
}
for (const name of knobs) input[name].addEventListener("input", show);
document.getElementById("reset").addEventListener("click", () => { for (const name of knobs) input[name].value = lattice.run[name]; show(); });
window.addEventListener("hashchange", readAddress);
readAddress();
