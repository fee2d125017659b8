"""Which limit binds each configuration, and which change would raise its capacity most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.binding_limits import bindings_of, featured_binding
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Section
from crossover.serving.capacity.binding_limit import BusyShares, sentence_of


def binding_limits(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the limits of the configurations in the first table; None where none is known."""
    bindings = bindings_of(data, answers)
    if not bindings:
        return None
    featured_cell, binding = featured_binding(bindings)
    limits = dict(bindings)

    def share_of(head: str, part: Callable[[BusyShares], float]) -> Column[CellData]:
        def share(cell: CellData) -> float | None:
            shares = limits[cell].shares
            return None if shares is None else round(part(shares), 2)

        return Column(head, "share", share, missing="–")

    def lifted_words(cell: CellData) -> str | None:
        rate = limits[cell].lifted_rate
        return None if rate is None else formatting.rate(rate, like=cell.unit_rate)

    return Section(
        slug="binding-limit",
        title="Binding limit",
        sentence=f"{featured_cell.name}: {sentence_of(binding, featured_cell.unit_rate)}",
        grades=("estimated",),
        table=table_of(
            limits,
            MODEL,
            DEVICE,
            Column("binding limit", "text", lambda cell: limits[cell].words),
            share_of("prompts", lambda shares: shares.prompts),
            share_of("weights", lambda shares: shares.weights),
            share_of("tokens", lambda shares: shares.rows),
            share_of("context", lambda shares: shares.context),
            Column("capacity after the change", "number", lifted_words, missing="–"),
        ),
        note="The binding limit is the part of a step whose cost, if it were halved, would raise "
        "the capacity most; where requests wait for slots or KV memory, twice as much of these is "
        "compared too. The shares are of the engine's busy time at its capacity, by its step-time "
        "model.",
    )
