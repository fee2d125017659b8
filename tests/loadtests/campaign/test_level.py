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
from loadtests.records.run_folder import read_records
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
