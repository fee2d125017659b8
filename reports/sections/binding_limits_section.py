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
        note="Binding: what would raise the capacity most if it cost half, or twice the slots or "
        "the KV memory where requests wait for these; the last column is the capacity then. The "
        "shares are of the engine's busy time at its capacity, by its step-time model.",
    )


def _row(cell: CellData, binding: BindingLimit) -> tuple[str, ...]:
    shares: tuple[float | None, ...] = (None,) * 4
    if binding.shares is not None:
        parts = binding.shares
        shares = (parts.prompts, parts.weights, parts.rows, parts.context)
    lifted = binding.lifted_rate
    return (
        cell.model,
        cell.device_words,
        binding.words,
        *("–" if share is None else formatting.share(round(share, 2), 2) for share in shares),
        "–" if lifted is None else formatting.rate(lifted, like=cell.like),
    )
