"""Every number of a report, computed again from the lines of its records by plain means."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from loadtests.metrics.level_summary import counted_as_one
from models.ladder import rung
from tests.reports.example_run import CONTEXT, PREDICTED, SLO, SLOTS

Line = dict[str, Any]


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def nearest_rank(values: list[float], share: float) -> float | None:
    """None where fewer than three observations lie beyond."""
    if len(values) * (1 - share) < 3 - 1e-9:
        return None
    return sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]


def plain_level(start: Line, requests: list[Line]) -> Line:
    """One level by the definitions: good is TTFT (from the due time) and TPOT within the SLO."""
    detail = start
    begin, end = detail["warmup_seconds"], detail["warmup_seconds"] + detail["window_seconds"]
    due = [r for r in requests if r["level"] == start["level"] and begin <= r["due_seconds"] < end]
    ttft = [r["first_content_seconds"] - r["due_seconds"] for r in due]
    tpot = [
        (r["last_content_seconds"] - r["first_content_seconds"])
        / (r["output_tokens"] - r["first_chunk_tokens"])
        for r in due
    ]
    good = sum(
        a <= SLO.ttft_seconds and b <= SLO.tpot_seconds for a, b in zip(ttft, tpot, strict=True)
    )  # type: ignore[operator]
    stamps = [at for r in requests if r["level"] == start["level"] for at in r["content_seconds"]]
    return {
        "due": len(due),
        "good": good,
        "ttft_p50_seconds": nearest_rank(ttft, 0.5),
        "ttft_p95_seconds": nearest_rank(ttft, 0.95),
        "ttft_p99_seconds": nearest_rank(ttft, 0.99),
        "ttft_mean_seconds": sum(ttft) / len(ttft),
        "tpot_p50_seconds": nearest_rank(tpot, 0.5),
        "tpot_p95_seconds": nearest_rank(tpot, 0.95),
        "tpot_mean_seconds": sum(tpot) / len(tpot),
        "output_tokens_per_second": sum(begin <= at < end for at in stamps)
        / (end - begin),  # one token a chunk
        "mean_prompt_tokens": sum(r["prompt_tokens"] for r in due) / len(due),
        "attainment": good / len(due),
    }


def plain_runs(start: Line, requests: list[Line]) -> tuple[int, ...]:
    """Lengths of runs of good, bad, good, ... requests in order of due time."""
    begin, end = start["warmup_seconds"], start["warmup_seconds"] + start["window_seconds"]
    due = [r for r in requests if r["level"] == start["level"] and begin <= r["due_seconds"] < end]
    lengths = [0]
    for one in sorted(due, key=lambda r: r["due_seconds"]):
        ttft = one["first_content_seconds"] - one["due_seconds"]
        took = one["last_content_seconds"] - one["first_content_seconds"]
        tpot = took / (one["output_tokens"] - one["first_chunk_tokens"])
        is_good = ttft <= SLO.ttft_seconds and tpot <= SLO.tpot_seconds  # type: ignore[operator]
        if is_good is (len(lengths) % 2 == 0):
            lengths.append(0)
        lengths[-1] += 1
    return tuple(lengths)


def test_every_level_is_what_its_records_say(folder: Path, written: Path) -> None:
    requests, events = lines(folder / "requests.jsonl"), lines(folder / "events.jsonl")
    starts = {event["level"]: event for event in events if event["kind"] == "level_started"}
    rows = table(written / "levels.csv")
    assert {row["level"] for row in rows} == set(starts)
    for row in rows:
        plain = plain_level(starts[row["level"]], requests)
        for name, value in plain.items():
            if value is None:
                assert row[name] == "", (row["level"], name)
            else:
                assert float(row[name]) == pytest.approx(value, rel=1e-9), (row["level"], name)


def test_verdicts_follow_from_wilsons_bounds(folder: Path, written: Path) -> None:
    """On effective numbers; a level that confirms the capacity holds."""
    requests, events = lines(folder / "requests.jsonl"), lines(folder / "events.jsonl")
    starts = {event["level"]: event for event in events if event["kind"] == "level_started"}
    z = NormalDist().inv_cdf(0.95)
    seen = set()
    for row in table(written / "levels.csv"):
        due, p = int(row["due"]), int(row["good"]) / int(row["due"])
        runs = plain_runs(starts[row["level"]], requests)
        together = counted_as_one(int(row["good"]), due, runs) if row["rate_per_second"] else 1.0
        n = due / together
        root = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (
            (p + z * z / (2 * n) - root) / (1 + z * z / n),
            (p + z * z / (2 * n) + root) / (1 + z * z / n),
        )
        assert float(row["attainment_low"]) == pytest.approx(low, abs=1e-9) and float(
            row["attainment_high"]
        ) == pytest.approx(high, abs=1e-9)
        expected = "holds" if low >= 0.9 else "fails" if high < 0.9 else "unresolved"
        is_confirming = row["confirms"] == "True"
        assert row["verdict"] == ("holds" if is_confirming else expected), row["level"]
        seen.add(row["verdict"])
    assert seen == {"holds", "fails", "unresolved"}


def test_resources_are_what_the_samples_say(folder: Path, written: Path) -> None:
    samples = lines(folder / "samples.jsonl")
    for row in table(written / "cells.csv"):
        own = [sample["engine"]["rss_bytes"] for sample in samples if sample["cell"] == row["cell"]]
        assert row["measured_peak_rss_bytes"] == (str(max(own)) if own else "")
    starts = {
        event["level"]: event
        for event in lines(folder / "events.jsonl")
        if event["kind"] == "level_started"
    }
    for row in table(written / "levels.csv"):
        detail = starts[row["level"]]
        begin = detail["started_unix_seconds"] + detail["warmup_seconds"]
        inside = [
            sample["client"]["cpu_share"]
            for sample in samples
            if sample["level"] == row["level"]
            and begin <= sample["unix_seconds"] < begin + detail["window_seconds"]
        ]
        assert float(row["client_cpu_cores"]) == pytest.approx(sum(inside) / len(inside))


def test_predicted_memory_is_arithmetic(written: Path) -> None:
    for row in table(written / "cells.csv"):
        spec = rung(row["model"]).spec
        per_token = spec.layers * 2 * spec.kv_heads * spec.head_dim * 2
        assert int(row["predicted_kv_bytes"]) == per_token * SLOTS * CONTEXT
        least = spec.parameters * 4.5 / 8  # the embedding is wider
        assert least <= int(row["predicted_weight_bytes"]) <= 1.5 * least


def test_capacities_lie_where_the_levels_leave_them_room(written: Path) -> None:
    """What is held was run, and held; the interval overlaps that up to the lowest that failed."""
    levels = table(written / "levels.csv")
    measured = 0
    for row in table(written / "cells.csv"):
        own = [
            level for level in levels if level["cell"] == row["cell"] and level["rate_per_second"]
        ]
        if row["model"] == "llama-3.2-3b":
            assert row["capacity_status"] == "none" and not own
            assert row["held_per_second"] == "" and row["capacity_words"].startswith("at no rate")
        elif own:
            measured += 1
            assert row["capacity_status"] == "confirmed"
            held = float(row["held_per_second"])
            (level,) = (one for one in own if one["confirms"] == "True")
            offered = int(level["due"]) / float(row["confirmed_seconds"])
            assert held == min(float(level["rate_per_second"]), offered)
            assert level["verdict"] == "holds"
            assert float(level["attainment"]) >= 0.9
            assert row["confirmed_requests"] == level["due"]
            failed = [float(x["rate_per_second"]) for x in own if x["verdict"] == "fails"]
            low, middle, high = (
                float(row[f"capacity_{name}_per_second"]) for name in ("low", "estimate", "high")
            )
            assert low < middle < high and low < min(failed) and held <= high
        else:
            assert row["capacity_status"] == "not_measured" and row["held_per_second"] == ""
    assert measured == 3


def test_a_prediction_is_in_columns_of_its_own(written: Path) -> None:
    rows = {row["model"]: row for row in table(written / "cells.csv")}
    one = rows["smollm2-135m"]
    low, middle, high = PREDICTED["smollm2-135m"]
    assert [float(one[f"predicted{n}_per_second"]) for n in ("_low", "", "_high")] == [
        low,
        middle,
        high,
    ]
    estimate, top = (float(one[f"capacity_{name}_per_second"]) for name in ("estimate", "high"))
    assert float(one["predicted_over_measured"]) == pytest.approx(middle / estimate)
    assert float(one["predicted_over_measured_low"]) == pytest.approx(middle / top)
    assert rows["smollm2-360m"]["predicted_per_second"] == ""


def test_what_the_runner_concluded_is_not_read(folder: Path, tmp_path: Path) -> None:
    """A journal with other conclusions gives the same report."""
    from reports.run import read_run

    copy = tmp_path / folder.name
    copy.mkdir()
    for name in ("manifest.json", "requests.jsonl", "samples.jsonl"):
        (copy / name).write_bytes((folder / name).read_bytes())
    changed = []
    for event in lines(folder / "events.jsonl"):
        if event["kind"] == "cell_finished":
            found = {"low": 100.0, "high": 200.0, "estimate": 150.0, "held": 100.0}
            event["capacities"] = {"chat": {**found, "status": "confirmed", "reason": ""}}
        if event["kind"] == "level_finished":
            event |= {
                "good": 0,
                "verdict": "fails",
                "is_valid": False,
                "warnings": ["GeneratorBusy"],
            }
        changed.append(json.dumps(event))
    (copy / "events.jsonl").write_text("\n".join(changed) + "\n")
    assert read_run(copy).cells == read_run(folder).cells


def test_the_page_and_the_markdown_show_these_numbers(written: Path) -> None:
    page, markdown = (written / "index.html").read_text(), (written / "report.md").read_text()
    for row in table(written / "levels.csv"):
        if row["rate_per_second"] and row["ttft_p50_seconds"]:
            ttft = float(row["ttft_p50_seconds"])
            shown = f"{ttft * 1000:.0f} ms" if 0.1 <= ttft < 0.995 else None
            if shown is not None:
                assert f">{shown}<" in page and f"| {shown} |" in markdown
    counted = sum(int(row["due"]) for row in table(written / "levels.csv"))
    assert f"{counted:,} of them due in the window" in page
    assert f"{counted:,} of them due in the window" in markdown
