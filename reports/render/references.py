"""Shipped results beside a run's: one table, the run's own rows first."""

from __future__ import annotations

from loadtests.capacity.words import in_short
from models import formatting
from models.formatting import model_title
from reports.numbers import RunNumbers
from reports.reference.results import References, Result, results_of
from reports.render.tables import Table, table_of

WORDS = (
    "Runs of others that are shipped with Crossover, of the same models under the same SLO and "
    "workload. They ran with their own versions on their own machines."
)


def reference_table(run: RunNumbers, found: References) -> Table:
    """A row for each model and run, those of a model together."""
    own = results_of(run, "this run")
    rows = sorted([*own, *found.results], key=lambda one: _order(one, own))
    return table_of(
        rows,
        (
            ("model", False, lambda one: model_title(one.model)),
            ("run", False, lambda one: one.run),
            ("machine", False, machine_of),
            ("engine", False, engine_of),
            ("holds", False, lambda one: in_short(one.capacity)),
            ("TTFT alone", True, lambda one: formatting.seconds(one.ttft_seconds)),
            ("TPOT alone", True, lambda one: formatting.seconds(one.tpot_seconds)),
            ("most output tokens/s", True, _tokens),
        ),
    )


def others_in_words(found: References) -> str:
    """What is left out, for people; "" for nothing."""
    if not found.others:
        return "" if found.results else "No shipped result is of a model of this run."
    return (
        f"{found.others} shipped results of these models have another SLO or workload and are "
        "left out."
    )


def machine_of(one: Result) -> str:
    """A result's machine, for people."""
    parts = [one.machine, f"{one.cores} cores" if one.cores else ""]
    parts.append(formatting.size(one.memory_bytes) if one.memory_bytes else "")
    return ", ".join(part for part in [*parts, *one.gpus] if part)


def engine_of(one: Result) -> str:
    """A result's engine and format, for people."""
    return f"{one.backend} {one.weight_format}".strip()


def _tokens(one: Result) -> str:
    tokens = one.output_tokens_per_second
    return formatting.NOT_MEASURED if tokens is None else formatting.significant(tokens, 3)


def _order(one: Result, own: list[Result]) -> tuple[int, bool, str]:
    models = [mine.model for mine in own]
    place = models.index(one.model) if one.model in models else len(models)
    return place, one not in own, one.run
