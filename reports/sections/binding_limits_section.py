"""Which limit binds each configuration, and what would lift it."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.binding_limits import binding_of
from crossover.reports.headline import Answer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Section, table
from crossover.serving.capacity.binding_limit import BindingLimit, sentence_of


def binding_limits(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no limit is known."""
    known = [(cell, binding) for cell, binding in bindings_of(data, answers)]
    if not known:
        return None
    cell, binding = featured(known)
    return Section(
        slug="binding-limit",
        title="Binding limit",
        sentence=f"{cell.name}: {sentence_of(binding)}",
        grades=("estimated",),
        table=table(
            (
                *("model", "device", "binding limit"),
                *("prompts", "weights", "tokens", "context", "lifted capacity"),
            ),
            (_row(cell, binding) for cell, binding in known),
            words=("device", "binding limit"),
        ),
        note="Binding: what would raise the capacity most if it cost half, or twice the slots or "
        "the KV memory where requests wait for these; the last column is the capacity then. The "
        "shares are of the engine's busy time at its capacity, by its step-time model.",
    )


def bindings_of(data: ReportData, answers: Sequence[Answer]) -> list[tuple[CellData, BindingLimit]]:
    """Return the configurations of the first table whose limit is known, with it."""
    cells = [cell for answer in answers for cell in answer.cells]
    found = ((cell, binding_of(cell, data.slo)) for cell in cells)
    return [(cell, binding) for cell, binding in found if binding is not None]


def featured(known: Sequence[tuple[CellData, BindingLimit]]) -> tuple[CellData, BindingLimit]:
    """Return the largest model that is served, else the last."""
    return next((pair for pair in reversed(known) if pair[0].is_served), known[-1])


def binding_line(data: ReportData, answers: Sequence[Answer]) -> str:
    """Return the sentence for the first screen; "" where no limit is known."""
    known = bindings_of(data, answers)
    if not known:
        return ""
    cell, binding = featured(known)
    return f"Binding limit of {cell.name}: {sentence_of(binding)}"


def _row(cell: CellData, binding: BindingLimit) -> tuple[str, ...]:
    shares = binding.shares
    parts: tuple[float | None, ...] = (None,) * 4
    if shares is not None:
        parts = (shares.prompts, shares.weights, shares.rows, shares.context)
    lifted = binding.lifted_rate
    return (
        cell.model,
        cell.device_words,
        binding.words,
        *("–" if part is None else formatting.share(round(part, 2), 2) for part in parts),
        "–" if lifted is None else formatting.rate(lifted, like=cell.like),
    )
