// Sliders: table, map and sentence follow the SLO, from a lattice that reports/slo_sliders.py computed
"use strict";
const lattice = JSON.parse(document.getElementById("lattice").textContent);
const knobs = ["ttft", "tpot", "target"];
const input = Object.fromEntries(knobs.map((name) => [name, document.getElementById(name)]));
document.documentElement.classList.add("scripted");

const original = new Map();
for (const one of document.querySelectorAll("#answers [data-cell], #headline, .basis, #map [data-bar]"))
  original.set(one, { html: one.innerHTML, x: one.getAttribute("x"), width: one.getAttribute("width"), shown: "" });

function rate(value, entry, rounded = Math.round) { // as models/formatting.py words it
  if (value === null) return "not known";
  if (value === 0) return "none";
  const [times, unit] = entry.unit;
  const scaled = value * times, digits = Math.max(0, 1 - Math.floor(Math.log10(scaled)));
  const step = 10 ** Math.floor(Math.log10(scaled) - 1);
  if (scaled >= 100) return Math.round(rounded(scaled / step + (rounded === Math.floor ? 1e-9 : 0)) * step).toLocaleString("en") + unit;
  const places = 10 ** Math.min(digits, 6);
  return (rounded(scaled * places + (rounded === Math.floor ? 1e-9 : 0)) / places).toFixed(Math.min(digits, 6)) + unit;
}
function seconds(value) { return value < 1 ? `${Math.round(value * 1000)} ms` : `${value} s`; }

function at(entry) { // the lattice's answer for one model on one device under the SLO of the sliders
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
function bar(svg, entry, kind, from, to) {
  const rect = svg.querySelector(`[data-model="${entry.model}"][data-side="${entry.side}"][data-bar="${kind}"]`);
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
    if (["interval", "name", "forecast"].includes(one.dataset.bar)) one.style.display = isRun() ? "" : "none";
  }
  const moved = document.getElementById("moved");
  if (isRun()) { moved.textContent = "This is the SLO of the run."; location.hash && history.replaceState(null, "", location.pathname + location.search); return; }
  const says = (name) => document.getElementById(`${name}-says`).textContent;
  const basis = document.querySelector(".basis");
  basis.textContent = basis.textContent.replace(/SLO: .* of requests/, `SLO moved to: first token within ${says("ttft")}, then ${says("tpot")} a token, for ${says("target")} of requests`);
  const served = {}, next = {};
  for (const entry of lattice.entries) {
    const found = at(entry), side = entry.side;
    const cell = (key) => document.querySelector(`#answers [data-model="${entry.model}"][data-cell="${key}"]`);
    const set = (key, text, grade) => {
      cell(key).innerHTML = `<span class="v"></span>` + (grade ? ` <i class="grade ${grade}">${grade}</i>` : "");
      cell(key).firstChild.textContent = text;
    };
    cell(`${side}-alone`).querySelector(".v").textContent = entry.alone + (found.alone ? ": met" : ": missed");
    set(`${side}-held`, found.alone ? (found.held ? rate(found.held, entry, Math.floor) : "none confirmed") : "misses the SLO unloaded", found.alone && found.held && "confirmed");
    set(`${side}-limit`, found.limit ? rate(found.limit, entry) : "–", found.limit && "estimated");
    if (cell("over")) {
      const gpu = entry.gpus[found.gpu] || null;
      set("over", gpu ? `${gpu.name}, ${gpu.price}` : "see the SLO of the run", gpu && "predicted");
    }
    for (const svg of maps) {
      const left = Number(svg.dataset.left), held = found.held ? place(svg, found.held) : left;
      const limit = found.limit ? Math.max(held, place(svg, found.limit)) : held;
      bar(svg, entry, "held", left, held); bar(svg, entry, "limit", held, limit);
      const rect = svg.querySelector(`[data-model="${entry.model}"][data-side="${side}"][data-bar="gpu"]`), was = rect && original.get(rect);
      if (rect) bar(svg, entry, "gpu", limit, Number(was.x) + Number(was.width));
    }
    if (found.limit || found.held) { served[side] = [entry, found]; next[side] = null; }
    else next[side] ||= entry;
  }
  const names = { cpu: "the CPU", gpu: "this machine's GPU" }, many = lattice.sides.length > 1;
  const sentences = lattice.sides.map((side) => {
    if (!served[side]) return `${names[side]} serves none of these models`;
    const [entry, found] = served[side];
    const said = found.held ? `${rate(found.held, entry, Math.floor)} confirmed` : `about ${rate(found.limit, entry)}, estimated`;
    const beyond = next[side] && !many && side === "cpu" ? `; from ${next[side].title} on a GPU takes over` : "";
    return `${names[side]} serves up to ${entry.title} (${said})${beyond}`;
  });
  document.getElementById("headline").textContent = `Under this SLO ${sentences.join("; ")}.`;
  moved.textContent = "Confirmed: from the measured levels. Estimated: the same simulation, under this SLO.";
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
