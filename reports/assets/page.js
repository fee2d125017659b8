// Draws the charts of the page and computes capacities again when the promise is moved. `vegaEmbed` comes from the bundle around this.
// A request is good, and a level holds, as in loadtests/timings.py and loadtests/slo.py. Under the promise of the run the capacities are those of the
// report; under any other they are read off the levels' verdicts alone: between the highest rate that holds and the lowest that fails.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const specs = read("specs"), data = read("answers");
const views = {};
document.documentElement.classList.add("scripted");

async function draw() {
  for (const [slug, spec] of Object.entries(specs)) {
    const place = document.querySelector(`[data-chart="${CSS.escape(slug)}"]`);
    if (!place) continue;
    const still = place.innerHTML;
    try {
      views[slug] = (await vegaEmbed(place, spec, { actions: false, renderer: "svg" })).view;
    } catch (problem) {
      place.innerHTML = still; // the still drawing is as good
      console.error(slug, problem);
    }
  }
  document.documentElement.dataset.drawn = Object.keys(views).length;
}

// ------------------------------------------------------------------ what the levels say about the capacity

function wilson(good, total, z) {
  if (!total) return [0, 1];
  const share = good / total, zz = z * z;
  const centre = (share + zz / (2 * total)) / (1 + zz / total);
  const half = (z / (1 + zz / total)) * Math.sqrt((share * (1 - share)) / total + zz / (4 * total * total));
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}

function verdict(good, due, promise) {
  const [low, high] = wilson(good, due, promise.z);
  return low >= promise.target ? "holds" : high < promise.target ? "fails" : "unresolved";
}

function judge(level, promise) {
  const kept = ([ttft, tpot]) => ttft !== null && (promise.ttft === null || ttft <= promise.ttft) && (promise.tpot === null || tpot === null || tpot <= promise.tpot);
  const due = level.answers.length, good = level.answers.filter(kept).length;
  return { rate: level.rate, valid: level.valid, due, good, verdict: verdict(good, due, promise) };
}

function capacity(levels, promise) {
  const found = (state, low = null, high = null) => ({ state, low, estimate: null, high });
  if (!levels.length) return found("not_measured");
  const byRate = new Map(); // null: one request at a time; levels at one rate count together
  for (const level of levels.filter((level) => level.valid)) {
    const counts = byRate.get(level.rate) || [0, 0];
    byRate.set(level.rate, [counts[0] + level.good, counts[1] + level.due]);
  }
  const lone = byRate.get(null);
  byRate.delete(null);
  if (lone && verdict(...lone, promise) === "fails") return found("none");
  const rates = (wanted) => [...byRate].filter(([, counts]) => verdict(...counts, promise) === wanted).map(([rate]) => rate);
  const failing = rates("fails"), high = failing.length ? Math.min(...failing) : null;
  const holding = rates("holds").filter((rate) => high === null || rate < high), low = holding.length ? Math.max(...holding) : null;
  return found(low === null ? "unresolved" : high === null ? "at_least" : "interval", low, high);
}

// ------------------------------------------------------------------ words

function significant(value, digits = 2) {
  if (value === 0) return "0";
  let places = digits - 1 - Math.floor(Math.log10(Math.abs(value)));
  const rounded = Number(value.toPrecision(digits));
  places = digits - 1 - Math.floor(Math.log10(Math.abs(rounded)));
  return places > 0 ? rounded.toFixed(places) : Math.round(value).toLocaleString("en-US");
}
const seconds = (value) => (value < 0.9995 ? `${significant(value * 1000)} ms` : `${significant(value)} s`);
const percent = (value) => `${+(value * 100).toFixed(1)} %`;
const digitsOf = (low, high) => ((high - low) / high > 0.05 ? 2 : 3);

function words(found) {
  if (found.state === "interval") {
    const digits = digitsOf(found.low, found.high);
    if (found.estimate === null) return `${significant(found.low, digits)} to ${significant(found.high, digits)} requests/s`;
    return `${significant(found.estimate, digits)} requests/s (${significant(found.low, digits)}–${significant(found.high, digits)})`;
  }
  if (found.state === "at_least") return `at least ${significant(found.low)} requests/s`;
  if (found.state === "none") return "at no rate";
  if (found.state === "unresolved") return found.high ? `unresolved: below ${significant(found.high)} requests/s` : "unresolved";
  return data.missing;
}

function label(cell, found) {
  if (cell.state === "skipped") return cell.label;
  if (found.state === "interval" && found.estimate !== null) return `${significant(found.estimate)}/s`;
  if (found.state === "interval") return `${significant(found.low)}–${significant(found.high)}/s`;
  if (found.state === "at_least") return `≥ ${significant(found.low)}/s`;
  return { none: "at no rate", unresolved: "unresolved", not_measured: data.missing }[found.state];
}

function sentence(results, promise) {
  const known = results.filter(({ found }) => found.state === "interval" || found.state === "at_least");
  const largest = known.reduce((best, one) => (!best || one.cell.size >= best.cell.size ? one : best), null);
  const lost = results.filter(({ cell, found }) => found.state === "none" && (!largest || cell.size > largest.cell.size)).sort((a, b) => a.cell.size - b.cell.size)[0];
  const limits = [promise.ttft === null ? "" : `first token within ${seconds(promise.ttft)}`, promise.tpot === null ? "" : `at most ${seconds(promise.tpot)} per token`];
  const start = `With ${limits.filter(Boolean).join(", ") || "no limit"}, for ${percent(promise.target)} of requests: `;
  if (largest) return `${start}${largest.cell.name} holds up to ${words(largest.found)}${lost ? `; ${lost.cell.name} does not hold at any rate.` : "."}`;
  return start + (lost ? "no model that was measured holds at any rate." : "it is unresolved which model holds.");
}

// ------------------------------------------------------------------ the panel

const steps = 100;
const logScale = (low, high) => ({ value: (at) => Number((low * Math.pow(high / low, at / steps)).toPrecision(2)), at: (value) => Math.round((steps * Math.log(value / low)) / Math.log(high / low)) });
const targets = [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999];
const knobs = {
  ttft: { ...logScale(0.05, 30), show: seconds, off: null, start: data.promise.ttft },
  tpot: { ...logScale(0.005, 2), show: seconds, off: null, start: data.promise.tpot },
  rate: { ...logScale(data.bottom, data.top), show: (value) => `${significant(value)}/s`, start: data.asked },
  target: { value: (at) => targets[at], at: (value) => targets.reduce((best, one, index) => (Math.abs(one - value) < Math.abs(targets[best] - value) ? index : best), 0), show: percent, start: data.promise.target },
};

let state = {};

const own = (promise) => ["ttft", "tpot", "target"].every((name) => promise[name] === data.promise[name]);

function results(promise) {
  return data.cells.map((cell) => {
    const levels = cell.levels.map((level) => judge(level, promise));
    return { cell, levels, found: cell.state !== "measured" || own(promise) ? cell.found : capacity(levels, promise) };
  });
}

function update() {
  const promise = { ttft: state.ttft, tpot: state.tpot, target: state.target, z: data.promise.z };
  const all = results(promise);
  document.getElementById("says").textContent = sentence(all, promise);
  document.getElementById("how").hidden = own(promise);
  document.getElementById("live").classList.toggle("no-rate", state.rate === null);
  const body = document.querySelector("#live tbody");
  body.replaceChildren(...all.map(({ cell, found }) => {
    const needed = state.rate === null ? "" : found.low ? String(Math.ceil(state.rate / found.low - 1e-9)) : found.state === "none" ? "none suffices" : "unknown";
    const texts = [cell.name, cell.state === "skipped" ? cell.words : words(found), cell.words, needed];
    const row = document.createElement("tr");
    row.dataset.cell = cell.key;
    texts.forEach((text, index) => { const td = document.createElement("td"); td.textContent = text; if (index) td.className = "n"; row.append(td); });
    return row;
  }));
  for (const [slug, spec] of Object.entries(specs)) {
    if (!spec.datasets?.columns || !views[slug]) continue;
    const byKey = new Map(all.map((one) => [one.cell.key, one]));
    const columns = spec.datasets.columns.map((column) => {
      const { cell, found } = byKey.get(column.key);
      return { ...column, low: found.low, estimate: found.estimate, high: found.high, state: cell.state === "measured" ? found.state : column.state, label: label(cell, found) };
    });
    const points = columns.flatMap((column) => byKey.get(column.key).levels.filter((level) => level.rate !== null)
      .map((level) => ({ key: column.key, model: column.model, size: column.size, rate: level.rate, verdict: level.verdict, good: level.good / level.due })));
    views[slug].data("columns", columns).data("points", points).run();
  }
  return all;
}

function start() {
  const box = document.getElementById("says");
  if (!box) return;
  for (const [name, knob] of Object.entries(knobs)) {
    const input = document.getElementById(name), out = document.getElementById(`${name}-out`);
    const show = () => { out.textContent = state[name] === null ? (name === "rate" ? "not said" : "no limit") : knob.show(state[name]); };
    if (name === "target") input.max = targets.length - 1;
    input.addEventListener("input", () => { state[name] = knob.value(Number(input.value)); show(); update(); });
    knob.reset = () => { state[name] = knob.start; input.value = knob.start === null ? (name === "rate" ? 0 : steps) : knob.at(knob.start); show(); };
    knob.reset();
  }
  document.getElementById("reset").addEventListener("click", () => { Object.values(knobs).forEach((knob) => knob.reset()); update(); });
  update();
}

// For tests and for the console: the capacities at any promise.
window.crossover = { results: (promise) => results({ ...data.promise, ...promise }).map(({ cell, found, levels }) => ({ key: cell.key, ...found, levels })) };

draw().then(start, start).then(() => { document.documentElement.dataset.ready = "yes"; });
