// Draws the charts, and shows the capacities at other limits: looked up in what Python computed (reports/render/lattice.py).
// Nothing is estimated or worded here. `vegaEmbed` comes from the bundle around this.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const specs = read("specs"), data = read("lattice");
const views = {};
document.documentElement.classList.add("scripted");

async function draw() {
  for (const [slug, spec] of Object.entries(specs)) {
    const place = document.querySelector(`[data-chart="${CSS.escape(slug)}"]`);
    if (!place) continue;
    const still = place.innerHTML, label = place.ariaLabel;
    try {
      views[slug] = (await vegaEmbed(place, spec, { actions: false, renderer: "svg" })).view;
      // Vega takes the label and names every mark instead; a chart is one picture, with a table behind it.
      Object.assign(place, { role: "img", ariaLabel: label, ariaRoleDescription: null });
      place.querySelector("svg").ariaHidden = "true";
    } catch (problem) {
      place.innerHTML = still; // the still drawing is as good
      console.error(slug, problem);
    }
  }
  document.documentElement.dataset.drawn = Object.keys(views).length;
}

const pick = (list, point) => list.values[list.at[point]];
const verdicts = { h: "holds", f: "fails", u: "unresolved" };

function machines(found, rate) {
  if (found.held) return String(Math.ceil(rate / found.held - 1e-9));
  return found.status === "none" ? "none suffices" : "not known";
}

// All cells at one point of the lattice: index of the TTFT limit, index of the TPOT limit.
function results(ttft, tpot) {
  const point = ttft * data.tpot.length + tpot;
  return { says: pick(data.says, point), cells: data.cells.map((cell) => ({ cell, point, found: pick(cell.found, point) })) };
}

let state = {};

function show() {
  const { says, cells } = results(state.ttft, state.tpot);
  const rate = state.rate === null ? null : data.rates[state.rate].value;
  document.getElementById("says").textContent = says;
  document.getElementById("live").classList.toggle("no-rate", rate === null);
  document.querySelector("#live tbody").replaceChildren(...cells.map(({ cell, found }) => {
    const row = document.createElement("tr");
    row.setAttribute("role", "row");
    row.dataset.cell = cell.key;
    const texts = [cell.name, found.words, pick(cell.found, data.own).words, rate === null ? "" : machines(found, rate)];
    const titles = [...document.querySelectorAll("#live th")].map((one) => one.textContent);
    texts.forEach((text, index) => { const td = document.createElement("td"); td.setAttribute("role", "cell"); td.textContent = text; td.dataset.title = titles[index]; if (index === 3) td.className = "n"; row.append(td); });
    return row;
  }));
  const byKey = new Map(cells.map((one) => [one.cell.key, one]));
  for (const [slug, spec] of Object.entries(specs)) {
    if (!spec.datasets?.columns || !views[slug]) continue;
    const columns = spec.datasets.columns.map((column) => ({ ...column, ...byKey.get(column.key).found }));
    const points = spec.datasets.columns.flatMap((column) => {
      const { cell, point } = byKey.get(column.key);
      return cell.levels.filter((level) => level.verdicts[point] !== "-").map((level) => ({ key: column.key, model: column.model, size: column.size, rate: level.rate, verdict: verdicts[level.verdicts[point]], good: level.good[point] / level.due }));
    });
    // What GPUs would hold was simulated under the run's SLO only.
    const isOwn = state.ttft * data.tpot.length + state.tpot === data.own;
    if (spec.datasets.machines) views[slug].data("machines", isOwn ? spec.datasets.machines : []);
    views[slug].data("columns", columns).data("points", points).run();
  }
  showBatch();
  showCost();
}

const steps = (rate, held) => Math.ceil(rate / held - 1e-9); // machines that serve a rate
function dollars(value) {
  if (value >= 0.1) return "$" + value.toFixed(2).replace(/\d(?=(\d{3})+\.)/g, "$&,");
  const exponent = Math.floor(Math.log10(Number(value.toPrecision(2))));
  return "$" + value.toFixed(1 - exponent);
}

// What each rate costs at one price, with what each cell holds at one point of the lattice.
function costs(point, price) {
  return data.cost.cells.flatMap((cell) => {
    const held = pick(data.cells.find((one) => one.key === cell.key).found, point).held;
    const known = point === data.own ? cell.own : cell.points.find((one) => one.held === held);
    if (!known) return [];
    const there = point === data.own ? cell.there : []; // predicted under the run's SLO only
    const here = { name: "", held, holds: known.holds, price: data.cost.prices[price].value, kind: "measured here", source: price === data.cost.own ? cell.source : "as you said", watts: cell.watts, watts_source: cell.watts_source };
    return [{ cell, sides: [here, ...there], words: known.words[price], even: known.even[price] }];
  });
}

function rateWords({ cell, sides }, rate) {
  return sides.map(({ name, held, price }, place) => {
    const count = steps(rate, held), cost = count * price, each = (cost / (rate * cell.output_tokens * 3600)) * 1e6;
    const shown = count.toLocaleString("en-US"), own = count === 1 ? "1 such machine" : `${shown} such machines`;
    const who = place ? `${name}: ${shown}` : own;
    return `${who} for ${dollars(cost)} an hour (${dollars(each)} per 1M tokens)`;
  }).join("; ");
}

function showCost() {
  const says = document.getElementById("cost-says");
  if (!says) return;
  const found = costs(state.ttft * data.tpot.length + state.tpot, state.price);
  const rate = state.rate === null ? null : data.rates[state.rate].value;
  says.textContent = found.map((one) => one.words).join(" ") || "No rate is confirmed under your SLO.";
  document.getElementById("cost-at").textContent = rate === null ? "" : found.map((one) => `${one.cell.name} at ${data.rates[state.rate].text}: ${rateWords(one, rate)}.`).join(" ");
  for (const one of found) {
    const view = views[data.charts.cost[one.cell.key]];
    if (!view) continue;
    const rows = one.sides.flatMap((side, place) => one.cell.rates.map((at) => ({ side: place ? side.name : "machines like this one", rate: at, machines: steps(at, side.held), dollars: steps(at, side.held) * side.price, holds: side.holds, kind: side.kind, source: side.source })));
    view.data("costs", rows).data("even", one.even).run();
    const used = one.sides.flatMap((side, place) => (side.watts === null ? [] : one.cell.rates.map((at) => ({ side: place ? side.name : "machines like this one", rate: at, machines: steps(at, side.held), joules: (steps(at, side.held) * side.watts) / (at * one.cell.output_tokens), source: side.watts_source }))));
    views[data.charts.joules[one.cell.key]]?.data("joules", used).run();
  }
}

// Speed against batch at one context and TPOT limit.
function batches(context, tpot) {
  return data.batch.cells.map(({ key, most, points }) => ({ key, most, lines: points[context].lines, best: points[context].best[tpot], words: points[context].words[tpot] }));
}

function showBatch() {
  const says = document.getElementById("batch-says");
  if (!says) return;
  const limit = data.tpot[state.tpot].value, found = batches(state.context, state.tpot);
  says.textContent = found.map((one) => one.words).join(" ");
  for (const one of found) {
    const view = views[data.charts.batch[one.key]];
    if (!view) continue;
    const edge = limit === null ? [] : [1, one.most].map((rows) => ({ rows, speed: rows / limit }));
    view.data("lines", one.lines).data("best", one.best).data("limit", edge).run();
  }
}

function start() {
  if (!document.getElementById("says")) return;
  const own = { ttft: Math.floor(data.own / data.tpot.length), tpot: data.own % data.tpot.length, rate: data.asked, context: 0, price: data.cost.own ?? 0 };
  const values = { ttft: data.ttft, tpot: data.tpot, rate: data.rates, context: data.batch.contexts, price: data.cost.prices };
  const resets = Object.entries(values).map(([name, list]) => {
    // One slider may stand in several places: all of them move together.
    const inputs = document.querySelectorAll(`[data-knob="${name}"]`), outs = document.querySelectorAll(`[data-shows="${name}"]`);
    const set = (at) => {
      state[name] = at;
      for (const out of outs) out.textContent = at === null ? "not said" : list[at].text;
      for (const input of inputs) { input.value = at ?? 0; input.setAttribute("aria-valuetext", outs[0].textContent); }
    };
    for (const input of inputs) {
      input.max = Math.max(list.length - 1, 0);
      input.addEventListener("input", () => { set(Number(input.value)); show(); });
    }
    return () => set(own[name]);
  });
  const reset = () => { resets.forEach((one) => one()); show(); };
  document.getElementById("reset").addEventListener("click", reset);
  reset();
}

addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
window.crossover = { results, batches, costs, rateWords }; // for tests and for the console

draw().then(start, start).then(() => { document.documentElement.dataset.ready = "yes"; });
