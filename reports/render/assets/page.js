// Draws the charts and computes capacities again when the SLO is moved: `judge` and `capacity` of capacity.js.
// `vegaEmbed` comes from the bundle around this. Under the run's own SLO the capacities are those of the report.

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

// ------------------------------------------------------------------ words

function significant(value, digits = 2) {
  if (value === 0) return "0";
  let places = digits - 1 - Math.floor(Math.log10(Math.abs(value)));
  const rounded = Number(value.toPrecision(digits));
  places = digits - 1 - Math.floor(Math.log10(Math.abs(rounded)));
  return places > 0 ? rounded.toFixed(places) : Math.round(value).toLocaleString("en-US");
}
const seconds = (value) => (value < 0.9995 ? `${+(value * 1000).toPrecision(3)} ms` : `${+value.toPrecision(4)} s`); // as models.formatting.limit
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

function sentence(results, slo) {
  const known = results.filter(({ found }) => found.state === "interval" || found.state === "at_least");
  const largest = known.reduce((best, one) => (!best || one.cell.size >= best.cell.size ? one : best), null);
  const lost = results.filter(({ cell, found }) => found.state === "none" && (!largest || cell.size > largest.cell.size)).sort((a, b) => a.cell.size - b.cell.size)[0];
  const limits = [slo.ttft === null ? "" : `first token within ${seconds(slo.ttft)}`, slo.tpot === null ? "" : `then ${seconds(slo.tpot)} a token`];
  const start = `With ${limits.filter(Boolean).join(", ") || "no limit"}, for ${percent(slo.target)} of requests: `;
  if (largest) return `${start}${largest.cell.name} meets it up to ${words(largest.found)}${lost ? `; ${lost.cell.name} does not meet it at any rate.` : "."}`;
  return start + (lost ? "no model that was measured meets it at any rate." : "it is unresolved which model meets it.");
}

// ------------------------------------------------------------------ the panel

const steps = 100;
const logScale = (low, high) => ({ value: (at) => Number((low * Math.pow(high / low, at / steps)).toPrecision(2)), at: (value) => Math.round((steps * Math.log(value / low)) / Math.log(high / low)) });
const targets = [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999];
const knobs = {
  ttft: { ...logScale(0.05, 30), show: seconds, off: null, start: data.slo.ttft },
  tpot: { ...logScale(0.005, 2), show: seconds, off: null, start: data.slo.tpot },
  rate: { ...logScale(data.bottom, data.top), show: (value) => `${significant(value)}/s`, start: data.asked },
  target: { value: (at) => targets[at], at: (value) => targets.reduce((best, one, index) => (Math.abs(one - value) < Math.abs(targets[best] - value) ? index : best), 0), show: percent, start: data.slo.target },
};

let state = {};

const own = (slo) => ["ttft", "tpot", "target"].every((name) => slo[name] === data.slo[name]);

function results(slo) {
  return data.cells.map((cell) => {
    const levels = cell.levels.map((level) => judge(level, slo));
    return { cell, levels, found: cell.state !== "measured" || own(slo) ? cell.found : capacity(levels, slo) };
  });
}

function update() {
  const slo = { ttft: state.ttft, tpot: state.tpot, target: state.target, z: data.slo.z };
  const all = results(slo);
  document.getElementById("says").textContent = sentence(all, slo);
  document.getElementById("how").hidden = own(slo);
  document.getElementById("live").classList.toggle("no-rate", state.rate === null);
  const body = document.querySelector("#live tbody");
  body.replaceChildren(...all.map(({ cell, found }) => {
    const needed = state.rate === null ? "" : found.low ? String(Math.ceil(state.rate / found.low - 1e-9)) : found.state === "none" ? "none suffices" : "unknown";
    const skipped = cell.state === "skipped"; // why stands in the table of capacities
    const texts = [cell.name, skipped ? cell.label : words(found), skipped ? cell.label : cell.words, needed];
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

// For tests and for the console: the capacities at any SLO.
window.crossover = { results: (slo) => results({ ...data.slo, ...slo }).map(({ cell, found, levels }) => ({ key: cell.key, ...found, levels })) };

draw().then(start, start).then(() => { document.documentElement.dataset.ready = "yes"; });
