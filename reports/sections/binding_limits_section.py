"""Which limit binds each configuration, and which change would raise its capacity most."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.answers.binding_limits import bindings_of, featured_binding
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Section, table
from crossover.serving.capacity.binding_limit import BindingLimit, sentence_of


def binding_limits(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the limits of the configurations in the first table; None where none is known."""
    bindings = bindings_of(data, answers)
    if not bindings:
        return None
    featured_cell, binding = featured_binding(bindings)
    return Section(
        slug="binding-limit",
        title="Binding limit",
        sentence=f"{featured_cell.name}: {sentence_of(binding)}",
        grades=("estimated",),
        table=table(
            (
                "model",
                "device",
                "binding limit",
                "prompts",
                "weights",
                "tokens",
                "context",
                "lifted capacity",
            ),
            (_row(cell, binding) for cell, binding in bindings),
            words=("device", "binding limit"),
        ),
        note="The binding limit is the part of a step whose cost, if it were halved, would raise "
        "the capacity most; where requests wait for slots or KV memory, twice as much of these is "
        "compared too. Lifted capacity: the capacity after that change. The other columns are "
        "shares of the engine's busy time at its capacity, by its step-time model.",
    )


def _row(cell: CellData, binding: BindingLimit) -> tuple[str, ...]:
    share_texts = ["–"] * 4
    if binding.shares is not None:
        parts = binding.shares
        shares = (parts.prompts, parts.weights, parts.rows, parts.context)
        share_texts = [formatting.share(round(share, 2), 2) for share in shares]
    lifted_text = "–"
    if binding.lifted_rate is not None:
        lifted_text = formatting.rate(binding.lifted_rate, like=cell.unit_rate)
    return (cell.model, cell.device_words, binding.words, *share_texts, lifted_text)
