// The capacity under a moved SLO, read off the levels: between the highest rate that meets it and the lowest that misses it.
// Requests and levels are judged as in loadtests/metrics (request_metrics.py, slo.py): tests/reports/render/test_page_js.py.

function wilson(good, total, z) {
  if (!total) return [0, 1];
  const share = good / total, zz = z * z;
  const centre = (share + zz / (2 * total)) / (1 + zz / total);
  const half = (z / (1 + zz / total)) * Math.sqrt((share * (1 - share)) / total + zz / (4 * total * total));
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}

function verdict(good, due, slo) {
  const [low, high] = wilson(good, due, slo.z);
  return low >= slo.target ? "holds" : high < slo.target ? "fails" : "unresolved";
}

function judge(level, slo) {
  const kept = ([ttft, tpot]) => ttft !== null && (slo.ttft === null || ttft <= slo.ttft) && (slo.tpot === null || tpot === null || tpot <= slo.tpot);
  const due = level.answers.length, good = level.answers.filter(kept).length;
  return { rate: level.rate, valid: level.valid, due, good, verdict: verdict(good, due, slo) };
}

function capacity(levels, slo) {
  const found = (state, low = null, high = null) => ({ state, low, estimate: null, high });
  if (!levels.length) return found("not_measured");
  const byRate = new Map(); // null: one request at a time; levels at one rate count together
  for (const level of levels.filter((level) => level.valid)) {
    const counts = byRate.get(level.rate) || [0, 0];
    byRate.set(level.rate, [counts[0] + level.good, counts[1] + level.due]);
  }
  const single = byRate.get(null);
  byRate.delete(null);
  if (single && verdict(...single, slo) === "fails") return found("none");
  const rates = (wanted) => [...byRate].filter(([, counts]) => verdict(...counts, slo) === wanted).map(([rate]) => rate);
  const failing = rates("fails"), high = failing.length ? Math.min(...failing) : null;
  const holding = rates("holds").filter((rate) => high === null || rate < high), low = holding.length ? Math.max(...holding) : null;
  return found(low === null ? "unresolved" : high === null ? "at_least" : "interval", low, high);
}
