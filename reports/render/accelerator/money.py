"""Energy per token, and what a rate costs on machines like this one and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from models.formatting import NOT_MEASURED
from reports.accelerator.costs import Comparison, Side
from reports.accelerator.joules import LevelEnergy, TdpEstimate, estimates_of, why_not_measured
from reports.numbers import RunNumbers
from reports.render.accelerator.section import Section
from reports.render.tables import load_words, significant, table_of
from reports.sentences import title

ENERGY_NOTE = (
    "Energy of the level's window over the output tokens that arrived in it: all CPU packages by "
    "RAPL, the GPU by its driver (NVML or amdgpu); memory, fans and power supply are not in it."
)
TDP_NOTE = (
    "Estimates: the thermal design power of the CPU, by this machine's part of its threads, over "
    "the tokens of each level. What it really drew is not known."
)
COST_NOTE = (
    "A rate takes as many machines as hold it by the confirmed rate; each is paid for all the "
    "time. $ per 1M are of output tokens. The price of this machine starts at that of as many "
    "rented cores; move it to your own. What a GPU holds is predicted under the SLO of the run: "
    "under another one GPUs are left out. Their joules are an estimate from TDP."
)


def energy_section(found: Sequence[LevelEnergy], run: RunNumbers) -> Section:
    """Joules per token as measured; else that they were not, and what TDP lets one expect."""
    guessed = [] if found else estimates_of(run)
    rows: list[LevelEnergy | TdpEstimate] = [*found, *guessed]
    note = TDP_NOTE if guessed else ""
    if found:
        note = ENERGY_NOTE
    return Section(
        slug="energy",
        title="Energy per token",
        finding=energy_words(found, run),
        note=note,
        sources=("measured here",) if found else ("predicted",),
        group="energy",
        table=table_of(
            rows,
            [
                ("model", False, lambda one: title(one.cell)),
                ("load", False, lambda one: load_words(one.level)),
                ("J a token", True, lambda one: significant(one.joules_per_token, " J")),
                ("power", True, lambda one: significant(one.watts, " W")),
                ("by", False, _by),
            ],
        ),
    )


def _by(one: LevelEnergy | TdpEstimate) -> str:
    if isinstance(one, TdpEstimate):
        return f"estimate, not measured: {one.source}"
    return f"measured by {one.energy.measured_by}"


def energy_words(found: Sequence[LevelEnergy], run: RunNumbers) -> str:
    """From the least to the most joules a token."""
    known = [one for one in found if one.joules_per_token]
    if not known:
        why = why_not_measured(run)
        return f"Energy per token: {NOT_MEASURED}{f' ({why})' if why else ''}."
    least = min(known, key=lambda one: one.joules_per_token or 0.0)
    most = max(known, key=lambda one: one.joules_per_token or 0.0)
    text = f"A token takes {significant(least.joules_per_token, ' J')} at least ({_where(least)})"
    if most is least:
        return f"{text}, by {least.energy.measured_by}."
    return (
        f"{text} and {significant(most.joules_per_token, ' J')} at most ({_where(most)}), by "
        f"{least.energy.measured_by}."
    )


def _where(one: LevelEnergy) -> str:
    return f"{title(one.cell)}, {load_words(one.level)}"


# ---------------------------------------------------------------- cost


def cost_section(found: Sequence[Comparison]) -> Section:
    """$ against rate, this machine beside the GPUs, and where they meet."""
    rows = [
        (one, side, rate)
        for one in found
        for rate in one.shown_rates
        for side in (one.here, *one.there)
    ]
    return Section(
        slug="cost",
        title="Cost against rate",
        finding=" ".join(cost_words(one) for one in found)
        or f"What a rate costs: {NOT_MEASURED}, no rate is confirmed.",
        note=COST_NOTE if found else "",
        sources=("measured here", "predicted", "published"),
        group="cost",
        panel="cost" if found else "",
        table=table_of(
            rows,
            [
                ("model", False, lambda row: title(row[0].cell)),
                ("requests", True, lambda row: formatting.rate(row[2])),
                ("by", False, lambda row: row[1].name),
                ("its rate is", False, lambda row: row[1].kind),
                ("one holds", True, lambda row: row[1].holds),
                ("how many", True, lambda row: formatting.count(row[1].machines(row[2]))),
                ("$ an hour", True, lambda row: dollars(row[1].dollars(row[2]))),
                ("$ per 1M tokens", True, lambda x: dollars(_million(*x))),
                ("J a token", True, lambda row: _side_joules(*row)),
                ("price from", False, lambda row: row[1].price_source),
            ],
        ),
    )


def _million(one: Comparison, side: Side, rate: float) -> float | None:
    return side.dollars_per_million(rate, one.output_tokens)


def _side_joules(one: Comparison, side: Side, rate: float) -> str:
    joules = side.joules_per_token(rate, one.output_tokens)
    if joules is None:
        return NOT_MEASURED
    return f"{formatting.significant(joules)} J ({side.watts_source})"


def dollars(value: float | None) -> str:
    """`$1.23`; two digits where it is less than ten cents."""
    if value is None:
        return NOT_MEASURED
    return f"${value:,.2f}" if value >= 0.1 else f"${formatting.significant(value)}"


def cost_words(one: Comparison) -> str:
    """Up to which rate machines like this cost less than the GPU that soonest does."""
    name = title(one.cell)
    if one.here.dollars_per_hour is None:
        return f"{name}: the price of a machine like this is not known."
    price = f"{dollars(one.here.dollars_per_hour)}/h a machine"
    if not one.there:
        million = dollars(one.here.dollars_per_million(one.here.held, one.output_tokens))
        return f"{name}, at {price}: {million} per 1M output tokens when it is full."
    gpu, even = one.soonest
    if even is None:
        return f"{name}, at {price}: machines like this one cost less than any GPU at every rate."
    price_there = f"{dollars(gpu.dollars_per_hour)}/h"
    cost = f"the {gpu.name} at {price_there}, {gpu.kind} to hold {gpu.holds},"
    if even == 0.0:
        return f"{name}, at {price}: {cost} costs less from the first request on."
    band = even_band(one)
    return (
        f"{name}, at {price}: up to {formatting.requests(even)}{band} machines like this one cost "
        f"less; above it {cost} does."
    )


def even_band(one: Comparison) -> str:
    """` (0.5–2.1)`: the break-even at the ends of both intervals."""
    low, high = one.even_interval
    if low is None or high is None or low == high:
        return ""
    return f" ({formatting.interval(low, high)}/s)"
