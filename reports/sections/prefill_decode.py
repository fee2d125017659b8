"""Prefill against decode: how quickly prompts are read and answers are written, by the step law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models import formatting
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.section import Section, Table


def prefill_decode(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no cell has a law."""
    rows = []
    for one in answers:
        found = speeds(one.cell)
        if found is not None:
            rows.append((one, *found))
    if not rows:
        return None
    last, reads, writes, share = rows[-1]
    table = Table(
        ("model", "reads prompts", "writes, one user", "time of a request in prompts"),
        tuple(
            (one.title, _tokens(read), _tokens(write), formatting.share(part, 2))
            for one, read, write, part in rows
        ),
        numeric=(1, 2, 3),
    )
    return Section(
        slug="prefill-decode",
        title="Prompts and answers",
        sentence=f"{last.title} reads {_tokens(reads)} of a prompt and writes {_tokens(writes)} "
        f"for one user; {formatting.share(share, 2)} of a request's time goes to its prompt.",
        grades=("estimated",),
        table=table,
        note="By the step law of this run. Prompts are bound by arithmetic, answers by reading "
        "all weights for each token: a GPU gains most where arithmetic binds.",
    )


def speeds(cell: CellData) -> tuple[float, float, float] | None:
    """(prompt tokens/s, tokens/s of one stream, share of a request's time in its prompt)."""
    if cell.law is None or cell.traffic is None:
        return None
    lengths, law = cell.traffic.lengths, cell.law
    prompt, output = float(np.mean(lengths.prompt)), float(np.mean(lengths.output))
    read = law.seconds(0, prompt, 0)
    token = law.seconds(1, 0, prompt + output / 2)
    return prompt / read, 1 / token, read / (read + token * max(output - 1, 0))


def _tokens(per_second: float) -> str:
    return f"{formatting.significant(per_second)} tokens/s"
