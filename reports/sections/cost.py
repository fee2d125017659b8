"""Cost: up to which price of a machine like this one the CPU is the cheaper way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from models import formatting
from reports.headline import Answer
from reports.report_data import ReportData
from reports.sections.section import Section, Table


def cost(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no GPU with a price takes over from a served model."""
    rows = []
    for one in answers:
        gpu = one.over.gpu if one.over is not None else None
        rate = one.cell.held or one.cell.limit
        if gpu is None or gpu.dollars_per_hour is None or not gpu.low or not rate:
            continue
        machines = max(1, math.ceil(gpu.low / rate))
        traffic = one.cell.traffic
        tokens = float(np.mean(traffic.lengths.output)) if traffic is not None else 0.0
        million = gpu.dollars_per_hour / (3600 * gpu.low * tokens) * 1e6 if tokens else None
        rows.append((one, gpu, rate, machines, million))
    if not rows:
        return None
    one, gpu = rows[-1][:2]
    table = Table(
        (
            *("model", "one of these holds", "GPU", "its low end", "its price"),
            *("as many as these", "each pays below", "$ a 1M tokens, GPU full"),
        ),
        tuple(
            (
                one.title,
                formatting.rate(rate, rounded="down"),
                gpu.name,
                formatting.rate(gpu.low, rounded="down"),
                formatting.dollars_per_hour(gpu.dollars_per_hour),
                str(machines),
                f"${formatting.significant((gpu.dollars_per_hour or 0.0) / machines)}/h",
                "–" if million is None else f"${formatting.significant(million)}",
            )
            for one, gpu, rate, machines, million in rows
        ),
        numeric=(1, 3, 4, 5, 6, 7),
    )
    return Section(
        slug="cost",
        title="Cost",
        sentence=f"One machine like this is the cheaper way for {one.title} while it costs less "
        f"than the {gpu.name} ({formatting.dollars_per_hour(gpu.dollars_per_hour)}).",
        grades=("predicted",),
        table=table,
        note="Machines come whole: up to what one of these holds, one stands against one GPU. "
        "`crossover plan` weighs a forecast, energy and what is already there.",
    )
