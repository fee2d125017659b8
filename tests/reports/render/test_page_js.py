"""The page's own arithmetic (capacity.js) against Python's, over random levels and SLOs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import resources
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtests.metrics.slo import Slo, verdict

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on this machine")

ASK = """
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const { levels, slo } = JSON.parse(line);
  const judged = levels.map((level) => judge(level, slo));
  console.log(JSON.stringify({ judged, found: capacity(judged, slo) }));
});
"""
Ask = Callable[[list[dict[str, Any]], Slo], dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Levels and an SLO to what the page makes of them."""
    code = resources.files("reports.render").joinpath("assets", "capacity.js").read_text("utf-8")
    command = [str(NODE), "-e", code + ASK]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as node:
        assert node.stdin is not None and node.stdout is not None
        stdin, stdout = node.stdin, node.stdout

        def send(levels: list[dict[str, Any]], slo: Slo) -> dict[str, Any]:
            limits = {"ttft": slo.ttft_seconds, "tpot": slo.tpot_seconds, "target": slo.target}
            limits["z"] = NormalDist().inv_cdf(slo.confidence)
            stdin.write(json.dumps({"levels": levels, "slo": limits}) + "\n")
            answer: dict[str, Any] = json.loads(stdout.readline())
            return answer

        yield send


def is_good(answer: tuple[float | None, float | None], slo: Slo) -> bool:
    ttft, tpot = answer
    if ttft is None or (slo.ttft_seconds is not None and ttft > slo.ttft_seconds):
        return False
    return slo.tpot_seconds is None or tpot is None or tpot <= slo.tpot_seconds


def expected_capacity(levels: list[dict[str, Any]], slo: Slo) -> dict[str, Any]:
    """Valid levels at one rate count together; the interval lies between their verdicts."""
    pooled: dict[float | None, list[bool]] = defaultdict(list)
    for level in levels:
        if level["valid"]:
            pooled[level["rate"]] += [is_good(answer, slo) for answer in level["answers"]]
    verdicts = {rate: verdict(sum(good), len(good), slo) for rate, good in pooled.items()}
    if not levels:
        return {"state": "not_measured", "low": None, "high": None}
    if verdicts.pop(None, None) == "fails":
        return {"state": "none", "low": None, "high": None}
    failing = [rate for rate, said in verdicts.items() if said == "fails" and rate is not None]
    high = min(failing, default=None)
    holding = [rate for rate, said in verdicts.items() if said == "holds" and rate is not None]
    low = max((rate for rate in holding if high is None or rate < high), default=None)
    if low is None:
        return {"state": "unresolved", "low": None, "high": high}
    return {"state": "at_least" if high is None else "interval", "low": low, "high": high}


times = st.sampled_from([None, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 9.0])
kinds = st.sampled_from([(0.05, 0.01), (0.05, None), (1.0, 0.1), (9.0, 0.01), (0.05, 9.0)])
answers = st.one_of(
    st.lists(st.tuples(times, times), max_size=30),
    st.builds(
        lambda good, bad: [(0.01, 0.01)] * good + bad,
        st.integers(0, 400),
        st.lists(kinds | st.just((None, None)), max_size=60),
    ),
)
levels_of_load = st.lists(
    st.fixed_dictionaries(
        {
            "rate": st.sampled_from([None, 0.25, 0.5, 1.0, 2.0, 4.0]),
            "valid": st.sampled_from([True, True, True, False]),
            "answers": answers,
        }
    ),
    max_size=7,
)
limits = st.none() | st.sampled_from([0.02, 0.1, 0.5, 1.5])
slos = st.builds(
    lambda ttft, tpot, target, confidence: Slo("x", ttft, tpot, target, confidence),
    limits,
    limits,
    st.sampled_from([0.5, 0.75, 0.9, 0.99]),
    st.sampled_from([0.8, 0.95, 0.99]),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(levels=levels_of_load, slo=slos)
def test_levels_and_capacity_are_judged_as_python_judges(
    ask: Ask, levels: list[dict[str, Any]], slo: Slo
) -> None:
    told = ask(levels, slo)
    for level, shown in zip(levels, told["judged"], strict=True):
        good = sum(is_good(answer, slo) for answer in level["answers"])
        due = len(level["answers"])
        assert (shown["good"], shown["due"]) == (good, due)
        assert shown["verdict"] == verdict(good, due, slo)
    assert {key: told["found"][key] for key in ("state", "low", "high")} == (
        expected_capacity(levels, slo)
    )
