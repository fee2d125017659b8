"""Prefill against decode: how quickly prompts are read and answers are written, by the step law."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.section import Section, table


def prefill_decode(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no cell has a law."""
    rows = [(one, *found) for one in answers if (found := speeds(one.cell)) is not None]
    if not rows:
        return None
    last, reads, writes, share = rows[-1]
    return Section(
        slug="prefill-decode",
        title="Prompts and answers",
        sentence=f"{last.title} reads {_tokens(reads)} of a prompt and writes {_tokens(writes)} "
        f"for one user; {formatting.share(share, 2)} of a request's time goes to its prompt.",
        grades=("estimated",),
        table=table(
            ("model", "reads prompts", "writes, one user", "time of a request in prompts"),
            (
                (one.title, _tokens(read), _tokens(write), formatting.share(part, 2))
                for one, read, write, part in rows
            ),
        ),
        note="By the step law of this run. Prompts are bound by arithmetic, answers by reading "
        "all weights for each token: a GPU gains most where arithmetic binds.",
    )


def speeds(cell: CellData) -> tuple[float, float, float] | None:
    """(prompt tokens/s, tokens/s of one stream, share of a request's time in its prompt)."""
    if cell.law is None or cell.traffic is None:
        return None
    law, prompt, output = cell.law, cell.traffic.mean_prompt, cell.traffic.mean_output
    read = law.seconds(0, prompt, 0)
    token = law.seconds(1, 0, prompt + output / 2)
    return prompt / read, 1 / token, read / (read + token * max(output - 1, 0))


def _tokens(per_second: float) -> str:
    return f"{formatting.significant(per_second)} tokens/s"
