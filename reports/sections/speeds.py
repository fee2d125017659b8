"""Prompts, answers and batches: how fast they are processed, by the step-time model of a run."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import Row, chart_of, layered, palette, series
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Chart, Section

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
# Share of the throughput that requests would have if sharing a step cost nothing. Below it, a
# mixture of experts is called slow for many. Dense models reach 0.4 with 16 requests on CPUs of few
# cores.
SLOW_BATCH_SHARE = 0.25


def prefill_decode(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the speeds of prompts and answers; None where there is no step-time model."""
    cells = [cell for answer in answers for cell in answer.cells if reading_speed(cell) is not None]
    if not cells:
        return None
    largest = cells[-1]
    return Section(
        slug="prefill-decode",
        title="Prompts and answers",
        sentence=f"{largest.name} reads {formatting.tokens_per_second(reading_speed(largest))} of "
        f"a prompt and writes {formatting.tokens_per_second(writing_speed(largest))} for a single "
        f"request; {formatting.share(_prompt_share(largest), 2)} of a request's time goes to its "
        "prompt.",
        grades=("estimated",),
        table=table_of(
            cells,
            MODEL,
            DEVICE,
            Column("reads prompts", "tokens/s", reading_speed),
            Column("writes, single request", "tokens/s", writing_speed),
            Column("share of a request's time in its prompt", "share", _prompt_share),
        ),
        note="From the step times of this run. Prompts are compute-bound; answers are "
        "memory-bound, since each token reads all weights. A GPU helps prompts most.",
    )


def reading_speed(cell: CellData) -> float | None:
    """Return prompt tokens/s of a single request of mean length; None: no step-time model."""
    if cell.step_times is None or cell.traffic is None:
        return None
    prompt = cell.traffic.mean_prompt
    return prompt / cell.step_times.seconds(0, prompt, 0)


def writing_speed(cell: CellData) -> float | None:
    """Return output tokens/s of a single request of mean length; None: no step-time model."""
    if cell.step_times is None or cell.traffic is None:
        return None
    context = cell.traffic.mean_prompt + cell.traffic.mean_output / 2
    return 1 / cell.step_times.seconds(1, 0, context)


def _prompt_share(cell: CellData) -> float | None:
    """Return the share of a single request's time that its prompt takes."""
    reading, writing = reading_speed(cell), writing_speed(cell)
    if reading is None or writing is None or cell.traffic is None:
        return None
    prompt_seconds = cell.traffic.mean_prompt / reading
    return prompt_seconds / (prompt_seconds + max(cell.traffic.mean_output - 1, 0) / writing)


def batch_size(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the throughput by batch size; None where there is no step-time model."""
    cells = [cell for answer in answers for cell in answer.cells]
    steps_of = {cell: steps for cell in cells if (steps := step_seconds(cell))}
    if not steps_of:
        return None
    *smaller, largest = steps_of
    mixtures = [cell for cell in smaller if cell.experts is not None]
    sentences = [batching_sentence(cell, steps_of[cell]) for cell in (*mixtures, largest)]
    return Section(
        slug="batch-size",
        title="Several requests at once",
        sentence=" ".join(sentences),
        grades=("estimated",),
        table=table_of(
            steps_of,
            MODEL,
            DEVICE,
            *(_batch_column(size, steps_of) for size in BATCH_SIZES),
        ),
        charts=(_chart({cell.name: steps for cell, steps in steps_of.items()}),),
        note="Tokens/s of all requests together and seconds of a step, from this run's step times.",
    )


def batching_sentence(cell: CellData, steps: dict[int, float]) -> str:
    """Return the throughput of the largest batch beside that of requests one by one.

    For a mixture of experts that gains little it says why: together, requests read most of the
    experts. `steps`: batch size -> seconds of a decode step.
    """
    largest = max(steps)
    gain = largest * steps[1] / steps[largest]
    if cell.experts is not None and gain < SLOW_BATCH_SHARE * largest:
        return (
            f"{cell.name}: its {cell.experts.used} of {cell.experts.count} experts make it fast "
            f"for one user ({formatting.tokens_per_second(1 / steps[1])}) and slow for many: "
            f"{largest} concurrent requests give {gain:.1f}x the throughput of one."
        )
    return (
        f"Batching {largest} requests of {cell.name} gives {gain:.1f}x the throughput of "
        f"serving them one by one; each token then takes {steps[largest] / steps[1]:.1f}x as long."
    )


def step_seconds(cell: CellData) -> dict[int, float]:
    """Return batch size -> seconds of a decode step, up to the slots; {} without a step-time
    model."""
    if cell.server is None or cell.traffic is None:
        return {}
    context = cell.traffic.mean_prompt + cell.traffic.mean_output / 2
    slots = cell.slots or cell.server.settings.slots
    sizes = [size for size in BATCH_SIZES if size <= slots] or [1]
    return {size: cell.server.step_times.seconds(size, 0, size * context) for size in sizes}


def _batch_column(size: int, steps_of: dict[CellData, dict[int, float]]) -> Column[CellData]:
    """Return the column of `169/s, 23 ms`: tokens/s of a batch, seconds of its step; `–`: it is
    larger than the slots."""

    def speed_words(cell: CellData) -> str | None:
        seconds = steps_of[cell].get(size)
        if seconds is None:
            return None
        return f"{formatting.significant(size / seconds)}/s, {formatting.seconds(seconds)}"

    return Column(f"{size} at once", "number", speed_words, missing="–")


def _chart(steps_by_name: dict[str, dict[int, float]]) -> Chart:
    import altair as alt

    rows: list[Row] = [
        {"model": name, "rows": size, "tokens": size / seconds}
        for name, steps in steps_by_name.items()
        for size, seconds in steps.items()
    ]
    lines = chart_of(rows).mark_line(point=True, strokeWidth=2)
    scale = alt.Scale(type="log", base=2, nice=False)
    sizes = sorted({row["rows"] for row in rows})
    x = alt.X("rows:Q", title="requests in a step", scale=scale, axis=alt.Axis(values=sizes))
    y = alt.Y("tokens:Q", title="tokens/s of all requests")
    color = palette("model:N", series(list(steps_by_name)))
    spec = layered([lines.encode(x=x, y=y, color=color)], 230)
    label = "Tokens per second of all requests together, by the number that share a step, by model."
    return Chart(slug="batch", label=label, spec=spec)
