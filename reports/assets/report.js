// Sliders: table, map and sentence follow the SLO, from a lattice that reports/slo_sliders.py computed
"use strict";
const lattice = JSON.parse(document.getElementById("lattice").textContent);
const knobs = ["ttft", "tpot", "target"];
const input = Object.fromEntries(knobs.map((name) => [name, document.getElementById(name)]));
document.documentElement.classList.add("scripted");

const original = new Map();
for (const one of document.querySelectorAll("#answers [data-cell], #headline, .basis, #map [data-bar]"))
  original.set(one, { html: one.innerHTML, x: one.getAttribute("x"), width: one.getAttribute("width"), shown: "" });

function rate(value, rounded = Math.round) { // as models/formatting.py words it
  if (value === null) return "not known";
  if (value === 0) return "none";
  const [times, unit] = lattice.unit;
  const scaled = value * times, digits = Math.max(0, 1 - Math.floor(Math.log10(scaled)));
  const step = 10 ** Math.floor(Math.log10(scaled) - 1);
  if (scaled >= 100) return Math.round(rounded(scaled / step + (rounded === Math.floor ? 1e-9 : 0)) * step).toLocaleString("en") + unit;
  const places = 10 ** Math.min(digits, 6);
  return (rounded(scaled * places + (rounded === Math.floor ? 1e-9 : 0)) / places).toFixed(Math.min(digits, 6)) + unit;
}
function seconds(value) { return value < 1 ? `${Math.round(value * 1000)} ms` : `${value} s`; }

function at(entry) { // the lattice's answer for one model under the SLO of the sliders
  const [i, j, k] = knobs.map((name) => Number(input[name].value));
  const place = (i * lattice.tpot.length + j) * lattice.target.length + k;
  return Object.fromEntries(Object.entries(entry.answers).map(([name, values]) => [name, values[place]]));
}
const isRun = () => knobs.every((name) => Number(input[name].value) === lattice.run[name]);

function place(svg, value) {
  const { low, high, left, right } = svg.dataset;
  const part = Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low);
  return Number(left) + part * (right - left);
}
function bar(svg, model, kind, from, to) {
  const rect = svg.querySelector(`[data-model="${model}"][data-bar="${kind}"]`);
  if (rect) { rect.setAttribute("x", from); rect.setAttribute("width", Math.max(0, to - from)); }
}
function show() {
  for (const name of knobs) {
    const value = lattice[name][Number(input[name].value)];
    document.getElementById(`${name}-says`).textContent = name === "target" ? `${Math.round(value * 1000) / 10} %` : seconds(value);
  }
  const maps = document.querySelectorAll("#map svg"); // for a page, for a phone
  for (const [one, was] of original) {
    one.innerHTML = was.html;
    if (was.x !== null) { one.setAttribute("x", was.x); one.setAttribute("width", was.width); }
    if (one.dataset.bar === "interval" || one.dataset.bar === "name") one.style.display = isRun() ? "" : "none";
  }
  const moved = document.getElementById("moved");
  if (isRun()) { moved.textContent = "This is the SLO of the run."; location.hash && history.replaceState(null, "", location.pathname + location.search); return; }
  const says = (name) => document.getElementById(`${name}-says`).textContent;
  const basis = document.querySelector(".basis");
  basis.textContent = basis.textContent.replace(/SLO: .* of requests/, `SLO moved to: first token within ${says("ttft")}, then ${says("tpot")} a token, for ${says("target")} of requests`);
  let served = null, next = null;
  for (const [model, entry] of lattice.models.entries()) {
    if (!entry) continue;
    const found = at(entry);
    const cell = (key) => document.querySelector(`#answers [data-model="${model}"][data-cell="${key}"]`);
    cell("alone").querySelector(".v").textContent = entry.alone + (found.alone ? ": met" : ": missed");
    cell("holds").innerHTML = `<span class="v"></span>` + (found.alone && found.held ? ` <i class="grade confirmed">confirmed</i>` : "");
    cell("holds").firstChild.textContent = found.alone ? (found.held ? rate(found.held, Math.floor) : "no rate confirmed") : "not even alone";
    cell("limit").innerHTML = `<span class="v"></span>` + (found.limit ? ` <i class="grade estimated">estimated</i>` : "");
    cell("limit").firstChild.textContent = found.limit ? rate(found.limit) : "–";
    const gpu = entry.gpus[found.gpu] || null;
    cell("over").innerHTML = `<span class="v"></span>` + (gpu ? ` <i class="grade predicted">predicted</i>` : "");
    cell("over").firstChild.textContent = gpu ? `${gpu.name}, ${gpu.price}` : "see the SLO of the run";
    for (const svg of maps) {
      const left = Number(svg.dataset.left), held = found.held ? place(svg, found.held) : left;
      const limit = found.limit ? Math.max(held, place(svg, found.limit)) : held;
      bar(svg, model, "held", left, held); bar(svg, model, "limit", held, limit);
      const rect = svg.querySelector(`[data-model="${model}"][data-bar="gpu"]`), was = rect && original.get(rect);
      if (rect) bar(svg, model, "gpu", limit, Number(was.x) + Number(was.width));
    }
    if (found.limit || found.held) { served = [entry, found]; next = null; }
    else if (!next) next = entry;
  }
  document.getElementById("headline").textContent = served
    ? `Under this SLO the CPU serves up to ${served[0].title} (${served[1].held ? `${rate(served[1].held, Math.floor)} confirmed` : `about ${rate(served[1].limit)}, estimated`})${next ? `; from ${next.title} on a GPU takes over` : ""}.`
    : "Under this SLO the CPU serves none of these models.";
  moved.textContent = "Confirmed: by levels that ran. Estimated: the same simulation, at this SLO.";
  history.replaceState(null, "", "#" + knobs.map((name) => `${name}=${lattice[name][Number(input[name].value)]}`).join("&"));
}
function fromHash() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const name of knobs) {
    const found = lattice[name].indexOf(Number(asked.get(name)));
    input[name].max = lattice[name].length - 1;
    input[name].value = asked.has(name) && found >= 0 ? found : lattice.run[name];
  }
  show();
}
for (const name of knobs) input[name].addEventListener("input", show);
document.getElementById("reset").addEventListener("click", () => { for (const name of knobs) input[name].value = lattice.run[name]; show(); });
window.addEventListener("hashchange", fromHash);
fromHash();
