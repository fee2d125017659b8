"""Levels of load on a real server: cut short where they are decided, and the next waits for an idle
server.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

from loadtests.campaign.campaign_file import parse_campaign
from loadtests.campaign.progress import Progress
from loadtests.campaign.runner import run
from loadtests.records.old_run_folder import read_records
from tests.loadtests.campaign.checks import check_folder

Start = Callable[..., str]


def test_a_hopeless_level_is_cut_short_and_the_next_waits_for_an_idle_server(
    truth_server: Start, tmp_path: Path
) -> None:
    """This server goes on with what its client has given up; the level after it must not be billed
    for that.
    """
    url = truth_server(slots=1, ttft=0.15, gap=0.0, cancels=False, case="hopeless")
    plan = parse_campaign(
        'name = "hopeless"\nworkload = { prompt_tokens = 16, output_tokens = 20 }\n'
        f'[slo]\npreset = "chat"\nttft_seconds = 0.3\ntarget = 0.8\n[target]\nurl = "{url}"\n'
        "[search]\nrates = [20.0, 2.0]\nrate_seconds = [2.5, 1.0]\nsingle_stream_requests = 3\n"
    )
    folder = run(plan, tmp_path, Progress(StringIO()), beside_others=True)
    check_folder(folder)
    _, cut, second = read_records(folder).levels()
    assert cut.finished.cut_short and cut.finished.window_seconds < 2.5
    assert cut.finished.verdict != "holds", "few requests of a busy machine may not prove more"
    first = min(second.requests, key=lambda record: record.due_seconds)
    assert first.first_content_seconds is not None
    waited = first.first_content_seconds - first.due_seconds
    assert waited < 1.0, "an idle server takes 0.15 s; what was given up keeps it busy for seconds"


def test_the_last_requests_of_a_level_do_not_end_in_an_empty_server(
    truth_server: Start, tmp_path: Path
) -> None:
    """Arrivals go on until the last answer that counts; they are on record for what they are."""
    url = truth_server(slots=99, ttft=0.5, case="follow")
    plan = parse_campaign(
        'name = "follow"\nworkload = { prompt_tokens = 16, output_tokens = 4 }\n'
        f'[slo]\npreset = "chat"\n[target]\nurl = "{url}"\n'
        "[search]\nrates = [30.0]\nrate_seconds = [1.0]\nsingle_stream_requests = 1\n"
    )
    folder = run(plan, tmp_path, Progress(StringIO()), beside_others=True)
    check_folder(folder)
    level = read_records(folder).levels()[-1]
    end = level.started.warmup_seconds + 1.0
    counted = [record for record in level.requests if record.due_seconds < end]
    last = max(record.ended_seconds or 0.0 for record in counted)
    later = [record for record in level.requests if end <= record.due_seconds]
    assert sum(record.due_seconds < last for record in later) > 5
    assert level.finished.cut_short is None and level.finished.window_seconds == 1.0
    assert level.finished.failed == 0 and level.finished.gave_up > 5
    inside = [record for record in counted if record.due_seconds >= level.started.warmup_seconds]
    assert level.finished.window_due == len(inside) == level.finished.good


def test_several_load_generators_share_a_campaigns_levels(
    truth_server: Start, tmp_path: Path
) -> None:
    url = truth_server(ttft=0.02, case="workers")
    plan = parse_campaign(
        'name = "workers"\nworkload = { prompt_tokens = 16, output_tokens = 4 }\n'
        f'[load]\nworkers = 2\n[slo]\npreset = "chat"\n[target]\nurl = "{url}"\n'
        "[search]\nrates = [30.0]\nrate_seconds = [1.0]\nsingle_stream_requests = 1\n"
    )
    folder = run(plan, tmp_path, Progress(StringIO()), beside_others=True)
    check_folder(folder)
    alone, level = read_records(folder).levels()
    assert alone.finished.workers == [] and len(level.finished.workers) == 2
    assert all(record.index % 2 == record.worker for record in level.requests)
    assert sum(one.due for one in level.finished.workers) == level.finished.due
