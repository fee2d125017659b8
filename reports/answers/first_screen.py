"""The first screen: the answer of a run as page, Markdown, picture, JSON and terminal show it.

    screen = first_screen_of(data, answers_of(data))
    screen.headline          # "2 cores of an AMD EPYC serve up to ..."
    screen.rows              # the table: a row for each model

Every output takes these values, so that no two outputs disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crossover.loadtests.capacity.capacity_text import none_words, reuse_words, users_words
from crossover.models import formatting
from crossover.reports.answers.answer_table import (
    AnswerColumn,
    TableCell,
    answer_row,
    columns_of,
    no_capacity_note,
    side_heads,
)
from crossover.reports.answers.binding_limits import bindings_of, featured_binding
from crossover.reports.answers.energy_and_cost import cost_lines
from crossover.reports.answers.headline import basis, headline
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.answers.report_warnings import alerts_of
from crossover.reports.answers.single_request import single_request_of
from crossover.reports.report_data import ReportData
from crossover.serving.capacity.binding_limit import sentence_of


class FirstScreen(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader sees first, in this order."""

    headline: str  # the answer in one sentence
    prefix_reuse: str  # by how much prefix caching raises the capacity; "": not known
    basis: str  # lengths, SLO and date, in one line
    alerts: tuple[str, ...]  # what a reader must not miss
    side_heads: tuple[tuple[str, str], ...]  # (side, its name and price); (): only one device
    columns: tuple[AnswerColumn, ...]
    rows: tuple[tuple[TableCell, ...], ...]  # the table, a row for each model
    table_note: str  # what an estimated capacity of "none" means; "": no row has one
    lines: tuple[str, ...]  # below the table: what would give a capacity, which limit binds, ...


def first_screen_of(data: ReportData, answers: Sequence[ModelAnswer]) -> FirstScreen:
    rows = tuple(answer_row(answer, data) for answer in answers)
    return FirstScreen(
        headline=headline(answers, data),
        prefix_reuse=_prefix_reuse_sentence(data, answers),
        basis=basis(data),
        alerts=tuple(alerts_of(data)),
        side_heads=side_heads(data),
        columns=columns_of(data),
        rows=rows,
        table_note=no_capacity_note(rows),
        lines=tuple(
            filter(
                None,
                (
                    *_none_lines(answers),
                    _single_request_line(answers),
                    _binding_line(data, answers),
                    *cost_lines(data, answers),
                ),
            )
        ),
    )


def _prefix_reuse_sentence(data: ReportData, answers: Sequence[ModelAnswer]) -> str:
    """Return what prefix caching is worth, for the largest model that each device serves: `Prefix
    caching raises the capacity of llama-3.2-1b on the CPU from 21 to 38 requests a minute, which
    serves about 34 users at a time.`

    "": the requests are no conversations, or no estimate without reuse is known.
    """
    sentences = []
    for side in data.sides:
        cells = [cell for answer in answers if (cell := answer.cell_on(side)) is not None]
        served = [(cell, cell.capacity) for cell in cells if cell.is_served and cell.capacity]
        if not served:
            continue
        largest, capacity = served[-1]
        sentence = reuse_words(capacity, largest.unit_rate, largest.name)
        users = users_words(capacity)
        if sentence and users:
            sentence = f"{sentence.removesuffix('.')}, which serves {users}."
        sentences.append(sentence)
    return " ".join(filter(None, sentences))


def _none_lines(answers: Sequence[ModelAnswer]) -> list[str]:
    """Return for each configuration without a capacity why there is none, and with which SLO or
    lengths there would be one."""
    cells = [cell for answer in answers for cell in answer.cells]
    return [
        f"No capacity of {cell.name}: {words}"
        for cell in cells
        if cell.capacity is not None and (words := none_words(cell.capacity))
    ]


def _single_request_line(answers: Sequence[ModelAnswer]) -> str:
    """Return the TTFT of single requests at stated lengths; "" where no step times are known."""
    cells = [cell for answer in answers for cell in answer.cells]
    known = [(cell, single) for cell in cells if (single := single_request_of(cell)) is not None]
    if not known:
        return ""
    _, first = known[0]
    times = [
        f"{cell.name} {formatting.seconds(single.mean_ttft_seconds)} and "
        f"{formatting.seconds(single.longest_ttft_seconds)}"
        for cell, single in known
    ]
    return (
        f"TTFT of a single request with the mean prompt ({first.mean_prompt_tokens:.0f} tokens) "
        f"and the longest ({first.longest_prompt_tokens:,} tokens), from the step times: "
        f"{'; '.join(times)}."
    )


def _binding_line(data: ReportData, answers: Sequence[ModelAnswer]) -> str:
    """Return which limit binds the largest model that is served; "" where none is known."""
    bindings = bindings_of(data, answers)
    if not bindings:
        return ""
    cell, binding = featured_binding(bindings)
    return f"Binding limit of {cell.name}: {sentence_of(binding, cell.unit_rate)}"
