"""Every number of a report, computed again from the lines of its records by plain means."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from models.ladder import rung
from tests.reports.example_run import CONTEXT, SLO, SLOTS

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


def test_verdicts_follow_from_wilsons_bounds(written: Path) -> None:
    z = NormalDist().inv_cdf(0.95)
    seen = set()
    for row in table(written / "levels.csv"):
        n, p = int(row["due"]), int(row["good"]) / int(row["due"])
        root = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (
            (p + z * z / (2 * n) - root) / (1 + z * z / n),
            (p + z * z / (2 * n) + root) / (1 + z * z / n),
        )
        expected = "holds" if low >= 0.9 else "fails" if high < 0.9 else "unresolved"
        assert row["verdict"] == expected
        assert float(row["attainment_low"]) == pytest.approx(low, abs=1e-9) and float(
            row["attainment_high"]
        ) == pytest.approx(high, abs=1e-9)
        seen.add(expected)
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
    """The interval overlaps that between the highest rate that held and the lowest that failed."""
    levels = table(written / "levels.csv")
    for row in table(written / "cells.csv"):
        own = [
            level for level in levels if level["cell"] == row["cell"] and level["rate_per_second"]
        ]
        if row["model"] == "llama-3.2-3b":
            assert row["capacity_state"] == "none" and row["capacity_per_second"] == "" and not own
        elif own:
            held = max(
                float(level["rate_per_second"]) for level in own if level["verdict"] == "holds"
            )
            failed = min(
                float(level["rate_per_second"]) for level in own if level["verdict"] == "fails"
            )
            low, middle, high = (
                float(row[f"capacity_{name}per_second"]) for name in ("low_", "", "high_")
            )
            assert low < middle < high
            assert low < failed and held < high, row["model"]
            assert 0.7 * held < middle < 1.3 * failed, row["model"]


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
            found = {"low": 100.0, "high": 200.0, "estimate": 150.0, "status": "resolved"}
            event["capacities"] = {"chat": {**found, "holds_at_any_rate": True, "reason": ""}}
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
