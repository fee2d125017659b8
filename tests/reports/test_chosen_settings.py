"""What the first screen says of slots that were chosen or set, and of single requests at stated
lengths, on a simulated server whose steps are known."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from crossover.loadtests.campaign.next_measurement import slots_words
from crossover.loadtests.records.journal_events import SlotsChosen, of_kind
from crossover.loadtests.records.run_folder import read_records
from crossover.reports.answers.binding_limits import binding_of
from crossover.reports.answers.first_screen import FirstScreen, first_screen_of
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.answers.single_request import single_request_of
from crossover.reports.report_data import CellData, ReportData, read_report
from crossover.serving.capacity.binding_limit import sentence_of
from tests.loadtests.campaign.simulated import Simulated, campaign

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

BASE, ROW, PROMPT = 0.1, 0.002, 0.0002  # seconds: many rows cost little more than one


@cache
def data(slots: int | None) -> ReportData:
    world = Simulated(base=BASE, row=ROW, prompt=PROMPT, slots=8)
    plan = campaign(300, slots=slots, ttft=2.0)
    return read_report(world.run(plan, Path(mkdtemp(prefix="crossover-slots-"))))


@cache
def screen(slots: int | None) -> FirstScreen:
    return first_screen_of(data(slots), answers_of(data(slots)))


def cell_of(slots: int | None) -> CellData:
    (cell,) = data(slots).cells
    return cell


def details(slots: int | None) -> str:
    (row,) = screen(slots).rows
    return " ".join(cell.detail for cell in row)


def test_slots_that_were_chosen_are_shown_and_not_advised_again() -> None:
    cell = cell_of(None)
    (choice,) = of_kind(read_records(Path(cell.folder)).events, SlotsChosen)
    assert choice.is_change and choice.slots > 16
    assert "chosen by the step times: they carry" in details(None)
    binding = binding_of(cell, data(None).slo)
    assert binding is not None and binding.kind != "slots"
    assert "slots would raise" not in " ".join(screen(None).lines)


def test_slots_that_the_campaign_sets_are_named_as_such_and_the_best_number_is_advised() -> None:
    assert "8 slots, as the campaign sets" in details(8)
    binding = binding_of(cell_of(8), data(8).slo)
    assert binding is not None and binding.kind == "slots" and binding.lifted_to is not None
    words = sentence_of(binding)
    assert f"{binding.lifted_to} slots would raise the capacity from" in words
    assert f"`slots = {binding.lifted_to}` in [server] of the campaign, or leave it out" in words
    chosen = cell_of(None)
    assert binding.lifted_rate == pytest.approx(chosen.estimated_rate, rel=0.15), "as it then is"


def test_single_requests_are_stated_at_the_mean_and_the_longest_prompt() -> None:
    """A step with a prompt of n tokens takes BASE + n PROMPT, and the requests are measured so."""
    cell = cell_of(8)
    single = single_request_of(cell)
    assert single is not None and cell.traffic is not None
    assert single.mean_prompt_tokens == pytest.approx(cell.traffic.mean_prompt, rel=0.05)
    assert single.longest_prompt_tokens == 128
    mean, longest = BASE + PROMPT * single.mean_prompt_tokens, BASE + PROMPT * 128
    assert single.mean_ttft_seconds == pytest.approx(mean, rel=0.1)
    assert single.longest_ttft_seconds == pytest.approx(longest, rel=0.1)
    assert single.measured_ratio == pytest.approx(1.0, abs=0.1)
    assert "at the longest of 128, from the step times; measured requests took" in details(8)
    assert "and the longest (128 tokens), from the step times: " in screen(8).lines[0]


def test_the_words_of_a_choice_have_one_unit() -> None:
    choice = SlotsChosen(cell="c", slots=64, rate=1.2, previous_slots=16, previous_rate=0.75)
    assert slots_words(choice, 0.5).startswith(
        "by the step times it carries 72 requests a minute with 64 slots, in place of 45 a minute"
    )
