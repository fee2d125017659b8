"""What each model of a plan loses beside the others, as a table and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crossover.models import formatting
from crossover.models.tables import Column, Table, table_of
from crossover.reports.answers.headline import slo_words
from crossover.reports.devices.device_capacity import MixedModel
from crossover.reports.plan.plan_costs import Mix, Plan

NO_ANSWER = "-"


class _Row(NamedTuple):
    """A model on a machine; `machine` is "" where it is that of the row above."""

    machine: str
    model: MixedModel


def mix_table(mixes: Sequence[Mix]) -> Table:
    """Return a row for each model on each machine."""
    rows = [
        _Row("" if number else mix.machine, model)
        for mix in mixes
        for number, model in enumerate(mix.models)
    ]
    return table_of(
        rows,
        Column("several models on", "text", lambda row: row.machine),
        Column("model", "text", lambda row: f"{row.model.model} {row.model.weight_format}"),
        Column("alone", "number", lambda row: _rate(row.model.unshared_rate)),
        Column("with the others", "number", lambda row: _rate(row.model.rate)),
        Column("of that alone", "share", lambda row: row.model.kept_share, missing=NO_ANSWER),
        Column("its steps take", "number", lambda row: _times(row.model.slowdown)),
    )


def mix_sentences(plan: Plan) -> Iterator[str]:
    """Yield what the columns mean; nothing if the plan is for one model."""
    if plan.mixes:
        yield (
            "Alone: the capacity of a machine with one of the models. With the others: its part of "
            "the capacity of all models, the highest rate at which each meets its own SLO. Its "
            "steps take: how many times as long as alone, since engines at work share the "
            "processor."
        )


def model_sentences(plan: Plan) -> Iterator[str]:
    """Yield the SLO, the lengths and the weights of each of several models."""
    for model in plan.models:
        yield (
            f"{model.model}, {formatting.share(model.share, 2)} of the requests: SLO "
            f"{slo_words(model.slo)}. Lengths: {model.lengths}. Weights: {model.weight_format} on "
            f"CPUs, {plan.gpu_format} on GPUs, unless they were measured."
        )


def _rate(rate: float | None) -> str:
    return formatting.rate(rate) if rate else NO_ANSWER


def _times(factor: float | None) -> str:
    return NO_ANSWER if factor is None else f"{factor:.1f}x"
