"""Several models on one machine, in tables and sentences: what each loses beside the others, and
what machines of their own, or the largest model alone, would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crossover.models import formatting
from crossover.models.tables import Column, Table, table_of
from crossover.reports.answers.headline import slo_words
from crossover.reports.devices.device_capacity import MixedModel
from crossover.reports.plan.mix_alternatives import Deployment, MixAlternative
from crossover.reports.plan.plan_costs import CostPlan, Mix

NO_ANSWER = "-"


class _Row(NamedTuple):
    """A model on a machine; `machine` is "" where it is that of the row above."""

    machine: str
    model: MixedModel


def mix_table(mixes: Sequence[Mix], unit_rate: float) -> Table:
    """Return a row for each model on each machine, with rates in the unit of `unit_rate`."""

    def rate_words(rate: float | None) -> str:
        return formatting.rate(rate, like=unit_rate) if rate else NO_ANSWER

    rows = [
        _Row("" if number else mix.machine, model)
        for mix in mixes
        for number, model in enumerate(mix.models)
    ]
    return table_of(
        rows,
        Column("several models on", "text", lambda row: row.machine),
        Column("model", "text", lambda row: f"{row.model.model} {row.model.weight_format}"),
        Column("alone", "number", lambda row: rate_words(row.model.unshared_rate)),
        Column("with the others", "number", lambda row: rate_words(row.model.rate)),
        Column("of that alone", "share", lambda row: row.model.kept_share, missing=NO_ANSWER),
        Column("its steps take", "number", lambda row: _times(row.model.slowdown)),
    )


def mix_sentences(plan: CostPlan) -> Iterator[str]:
    """Yield what the columns mean; nothing if the plan is for one model."""
    if plan.mixes:
        yield (
            "Alone: the capacity of a machine with one of the models. With the others: its part of "
            "the capacity of all models, the highest rate at which each meets its own SLO. Its "
            "steps take: how many times as long as alone, since engines at work share the "
            "processor."
        )


def alternatives_table(alternatives: Sequence[MixAlternative]) -> Table:
    """Return a row for each kind of machine: what the three deployments cost."""
    columns: list[Column[MixAlternative]] = [
        Column("$/month on", "text", lambda row: row.machine),
        Column("all models on each", "text", lambda row: _deployment_words(row.shared)),
        Column("a machine for each", "text", lambda row: _deployment_words(row.separate)),
    ]
    largest_models = dict.fromkeys(row.largest_model for row in alternatives if row.largest)
    for model in largest_models:  # of all rows the same
        columns.append(
            Column(
                f"{model} for all",
                "text",
                lambda row: _deployment_words(row.largest) if row.largest else None,
                missing=NO_ANSWER,
            )
        )
    return table_of(alternatives, *columns)


def alternatives_sentences(alternatives: Sequence[MixAlternative]) -> Iterator[str]:
    """Yield for each kind of machine whether all models on each of them cost less than a machine
    for each model, and why; then what the router saves."""
    for row in alternatives:
        words = [_comparison_words(row)]
        if row.largest is not None:
            words.append(_saving_words(row, row.largest))
        if said := " ".join(filter(None, words)):
            yield f"{row.machine}: {said}"


def _comparison_words(row: MixAlternative) -> str:
    """Return which of the two costs less and why; "": neither is known to serve."""
    shared, separate = row.shared, row.separate
    if row.reason:
        if separate.certainty != "yes":
            return ""
        return f"only with a machine for each model ({row.reason})."
    if shared.certainty != "yes" or separate.certainty != "yes":
        return ""
    why = _why(row)
    if shared.dollars is None or separate.dollars is None:
        counts = f"{_count_words(shared)}, a machine for each {_count_words(separate)}"
        return f"all models on each take {counts}, since {why}."
    difference = separate.dollars - shared.dollars
    if abs(difference) < 0.5:
        return f"all models on each and a machine for each cost the same, since {why}."
    cheaper = "all models on each cost" if difference > 0 else "a machine for each model costs"
    return f"{cheaper} {formatting.dollars(abs(difference))} a month less, since {why}."


def _why(row: MixAlternative) -> str:
    """Return why the one deployment takes fewer machines than the other."""
    shared, separate = row.shared.machines or 0, row.separate.machines or 0
    if shared == separate:
        return "both take the same number of machines"
    if shared < separate:
        busy = " and ".join(formatting.share(share, 2) for share in row.separate.busy_shares)
        return f"machines of their own would be busy for only {busy} of what they can serve"
    return (
        "models that share a machine slow each other down, so that each meets its SLO only at a "
        f"lower rate: {shared} machines, not {separate}"
    )


def _saving_words(row: MixAlternative, largest: Deployment) -> str:
    """Return what the router saves; "": it is not known."""
    deployments = [one for one in (row.shared, row.separate) if one.is_sure]
    dollars = [one.dollars for one in deployments if one.dollars is not None]
    if not dollars:
        return ""
    if largest.certainty != "yes":
        return f"{row.largest_model} alone does not serve all requests."
    if not largest.is_sure or largest.dollars is None:
        return ""
    saving = largest.dollars - min(dollars)
    if saving < 0.5:
        return (
            f"{row.largest_model} for all requests costs no more, so the other models save nothing."
        )
    more = formatting.dollars(saving)
    return f"{row.largest_model} for all requests would cost {more} a month more."


def _deployment_words(deployment: Deployment) -> str:
    """Return `$1,176 (2 machines)`, `price unknown (2 machines)` or `no`."""
    if deployment.certainty != "yes":
        return deployment.certainty
    dollars = deployment.dollars
    cost = "price unknown" if dollars is None else formatting.dollars(dollars)
    energy = " + energy" if deployment.energy_unknown else ""
    return f"{cost}{energy} ({_count_words(deployment)})"


def _count_words(deployment: Deployment) -> str:
    count = deployment.machines
    return "1 machine" if count == 1 else f"{count} machines"


def model_sentences(plan: CostPlan) -> Iterator[str]:
    """Yield the SLO, the lengths and the weights of each of several models."""
    for model in plan.models:
        yield (
            f"{model.model}, {formatting.share(model.share, 2)} of the requests: SLO "
            f"{slo_words(model.slo)}. Lengths: {model.lengths}. Weights: {model.weight_format} on "
            f"CPUs, {plan.gpu_format} on GPUs, unless they were measured."
        )


def _times(factor: float | None) -> str:
    return NO_ANSWER if factor is None else f"{factor:.1f}x"
