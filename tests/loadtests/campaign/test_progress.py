"""What a run says while it goes on, and at its end."""

from __future__ import annotations

import contextlib
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.campaign.campaign_text import show_run
from crossover.loadtests.campaign.progress import Progress
from tests.loadtests.campaign.simulated import Simulated, campaign, rate_units_in

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    out = StringIO()
    with Progress(out, log_interval_seconds=0.0) as progress:
        progress.set_status("360m", "waits", 60.0)
        progress.say("a [b] c")
        progress.tick("level", 0.5)
        progress.log("shown")
    lines = out.getvalue().splitlines()
    ends = ("a [b] c", "... level, 50%", "shown")
    assert [line[6:] for line in lines] == [*ends]


def test_a_terminal_has_a_line_a_cell_and_the_time_left() -> None:
    out = StringIO()
    progress = Progress(out)
    progress._console = Console(file=out, force_terminal=True, width=100)
    with progress:
        progress.set_status("135m", "holds 1.5/s")
        progress.set_status("360m", "limit about 1.0/s", 125.0)
        progress.tick("360m: 1.6 requests/s: 84 of 86 good, 43 s left", 0.4)
        progress.log("not shown")
        progress._live.refresh()  # type: ignore[union-attr]
    shown = out.getvalue()
    for part in ("135m", "holds 1.5/s", "limit about 1.0/s", "84 of 86 good", "(at most 2 min"):
        assert part in shown, part
    assert "not shown" not in shown


def test_the_answer_is_a_table_with_grades_and_what_confirming_takes(tmp_path: Path) -> None:
    plan = campaign(480, models='["135m", "360m"]', search="confirm = 1")
    text = plan.text.replace("tpot_seconds = 0.2", "tpot_seconds = 0.2\ne2e_seconds = 30")
    folder = Simulated().run(parse_campaign(text), tmp_path)
    out = StringIO()
    show_run(folder, Console(file=out, width=160))
    output = out.getvalue()
    for part in (
        "TTFT 1 s, TPOT 200 ms, E2E 30 s for 90 % of requests",
        *("confirmed", "estimated"),
        *("--confirm", "To confirm the estimates, which takes about "),
    ):
        assert part in output, part
    assert len(rate_units_in(output)) == 1, "all rates have one unit"


def test_the_result_is_printed_though_nobody_reads_the_progress(capfd):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with contextlib.suppress(BrokenPipeError), open(write_end, "w") as stream:
        with Progress(stream) as progress:
            progress.say("measuring")
        print("result", flush=True)
    assert capfd.readouterr().out == "result\n"
