"""Prompts, answers and batches: how quickly they are read and written, by the step-time model of a
run."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.chart_style import Row, data, layered, palette, series
from crossover.reports.headline import Answer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Chart, Section, table

ROWS = (1, 2, 4, 8, 16, 32)
# Of the throughput that requests would have if they shared a step for nothing: below it, a mixture
# of experts is slow for many. Dense models reach 0.4 of it with 16 requests on CPUs of few cores.
SLOW_FOR_MANY = 0.25


def prefill_decode(data_: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no cell has a step-time model."""
    cells = [cell for one in answers for cell in one.cells]
    rows = [(cell, *found) for cell in cells if (found := speeds(cell)) is not None]
    if not rows:
        return None
    last, reads, writes, share = rows[-1]
    return Section(
        slug="prefill-decode",
        title="Prompts and answers",
        sentence=f"{last.name} reads {_tokens(reads)} of a prompt and writes {_tokens(writes)} for "
        f"a single request; {formatting.share(share, 2)} of a request's time goes to its prompt.",
        grades=("estimated",),
        table=table(
            (
                "model",
                "device",
                "reads prompts",
                "writes, single request",
                "time of a request in prompts",
            ),
            (
                (
                    cell.model,
                    cell.device_words,
                    _tokens(read),
                    _tokens(write),
                    formatting.share(part, 2),
                )
                for cell, read, write, part in rows
            ),
            words=("device",),
        ),
        note="From the step times of this run. Prompts are compute-bound; answers are "
        "memory-bound, since each token reads all weights. A GPU helps prompts most.",
    )


def speeds(cell: CellData) -> tuple[float, float, float] | None:
    """(prompt tokens/s, tokens/s of one stream, share of a request's time in its prompt)."""
    if cell.step_times is None or cell.traffic is None:
        return None
    step_times, prompt, output = cell.step_times, cell.traffic.mean_prompt, cell.traffic.mean_output
    read = step_times.seconds(0, prompt, 0)
    token = step_times.seconds(1, 0, prompt + output / 2)
    return prompt / read, 1 / token, read / (read + token * max(output - 1, 0))


def _tokens(per_second: float) -> str:
    return f"{formatting.significant(per_second)} tokens/s"


def batch_size(data_: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no cell has a step-time model."""
    cells = [cell for one in answers for cell in one.cells]
    known = [(cell, steps) for cell in cells if (steps := step_seconds(cell))]
    if not known:
        return None
    mixtures = [(cell, steps) for cell, steps in known[:-1] if cell.experts is not None]
    return Section(
        slug="batch-size",
        title="Several requests at once",
        sentence=" ".join(batching_sentence(cell, steps) for cell, steps in [*mixtures, known[-1]]),
        grades=("estimated",),
        table=table(
            ("model", "device", *(f"{rows} at once" for rows in ROWS)),
            (
                (cell.model, cell.device_words, *(_cell(each, rows) for rows in ROWS))
                for cell, each in known
            ),
            words=("device",),
        ),
        charts=(_chart({cell.name: steps for cell, steps in known}),),
        note="Tokens/s of all requests together and seconds of a step, from this run's step times.",
    )


def batching_sentence(cell: CellData, steps: dict[int, float]) -> str:
    """What serving many requests together gives beside serving them one by one, and, of a mixture
    of experts, why that is little: requests together read most of its experts."""
    many = max(steps)
    throughput = many * steps[1] / steps[many]
    if cell.experts is not None and throughput < SLOW_FOR_MANY * many:
        return (
            f"{cell.name}: its {cell.experts.used} of {cell.experts.count} experts make it fast "
            f"for one user ({_tokens(1 / steps[1])}) and slow for many: {many} concurrent "
            f"requests give {throughput:.1f}x the throughput of one."
        )
    return (
        f"Batching {many} requests of {cell.name} gives {throughput:.1f}x the throughput of "
        f"serving them one by one; each token then takes {steps[many] / steps[1]:.1f}x as long."
    )


def step_seconds(cell: CellData) -> dict[int, float]:
    """Seconds of a decode step by its rows, up to the slots; {} without a step-time model."""
    if cell.step_times is None or cell.traffic is None or cell.policy is None:
        return {}
    context = cell.traffic.mean_prompt + cell.traffic.mean_output / 2
    counts = [rows for rows in ROWS if rows <= (cell.slots or cell.policy.slots)] or [1]
    return {rows: cell.step_times.seconds(rows, 0, rows * context) for rows in counts}


def _cell(steps: dict[int, float], rows: int) -> str:
    if rows not in steps:
        return "–"
    return f"{formatting.significant(rows / steps[rows])}/s, {formatting.seconds(steps[rows])}"


def _chart(known: dict[str, dict[int, float]]) -> Chart:
    import altair as alt

    rows: list[Row] = [
        {"model": name, "rows": count, "tokens": count / seconds}
        for name, steps in known.items()
        for count, seconds in steps.items()
    ]
    lines = data(rows).mark_line(point=True, strokeWidth=2)
    x = alt.X("rows:Q", title="requests in a step", scale=alt.Scale(type="log", base=2))
    y = alt.Y("tokens:Q", title="tokens/s of all requests")
    colour = palette("model:N", series(list(known)))
    spec = layered([lines.encode(x=x, y=y, color=colour)], 230)
    label = "Tokens per second of all requests together, by the number that share a step, by model."
    return Chart(slug="batch", label=label, spec=spec)
