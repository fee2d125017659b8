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
    row.dataset.cell = cell.key;
    const texts = [cell.name, found.words, pick(cell.found, data.own).words, rate === null ? "" : machines(found, rate)];
    const titles = [...document.querySelectorAll("#live th")].map((one) => one.textContent);
    texts.forEach((text, index) => { const td = document.createElement("td"); td.textContent = text; td.dataset.title = titles[index]; if (index === 3) td.className = "n"; row.append(td); });
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
    views[slug].data("columns", columns).data("points", points).run();
  }
}

function start() {
  if (!document.getElementById("says")) return;
  const own = { ttft: Math.floor(data.own / data.tpot.length), tpot: data.own % data.tpot.length, rate: data.asked };
  const steps = { ttft: data.ttft, tpot: data.tpot, rate: data.rates };
  const resets = Object.entries(steps).map(([name, values]) => {
    const input = document.getElementById(name), out = document.getElementById(`${name}-out`);
    input.max = values.length - 1;
    const set = (at) => { state[name] = at; out.textContent = at === null ? "not said" : values[at].text; };
    input.addEventListener("input", () => { set(Number(input.value)); show(); });
    return () => { set(own[name]); input.value = own[name] ?? 0; };
  });
  const reset = () => { resets.forEach((one) => one()); show(); };
  document.getElementById("reset").addEventListener("click", reset);
  reset();
}

window.crossover = { results }; // for tests and for the console

draw().then(start, start).then(() => { document.documentElement.dataset.ready = "yes"; });
