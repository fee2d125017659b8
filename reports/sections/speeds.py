"""Prompts, answers and batches: how fast they are processed, by the step-time model of a run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import Row, chart_of, layered, palette, series
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Chart, Section, table

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
# Share of the throughput that requests would have if sharing a step cost nothing. Below it, a
# mixture of experts is called slow for many. Dense models reach 0.4 with 16 requests on CPUs of few
# cores.
SLOW_BATCH_SHARE = 0.25


class Speeds(msgspec.Struct, frozen=True):
    """How fast a configuration serves a single request of mean length."""

    prompt_tokens_per_second: float
    stream_tokens_per_second: float
    prompt_time_share: float  # of the request's time


def prefill_decode(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the speeds of prompts and answers; None where there is no step-time model."""
    cells = [cell for answer in answers for cell in answer.cells]
    rows = [(cell, speeds) for cell in cells if (speeds := speeds_of(cell)) is not None]
    if not rows:
        return None
    last_cell, last_speeds = rows[-1]
    return Section(
        slug="prefill-decode",
        title="Prompts and answers",
        sentence=f"{last_cell.name} reads {_tokens(last_speeds.prompt_tokens_per_second)} of a "
        f"prompt and writes {_tokens(last_speeds.stream_tokens_per_second)} for a single request; "
        f"{formatting.share(last_speeds.prompt_time_share, 2)} of a request's time goes to its "
        "prompt.",
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
                    _tokens(speeds.prompt_tokens_per_second),
                    _tokens(speeds.stream_tokens_per_second),
                    formatting.share(speeds.prompt_time_share, 2),
                )
                for cell, speeds in rows
            ),
            words=("device",),
        ),
        note="From the step times of this run. Prompts are compute-bound; answers are "
        "memory-bound, since each token reads all weights. A GPU helps prompts most.",
    )


def speeds_of(cell: CellData) -> Speeds | None:
    """Return the speeds of a configuration; None: it has no step-time model."""
    if cell.step_times is None or cell.traffic is None:
        return None
    step_times, prompt, output = cell.step_times, cell.traffic.mean_prompt, cell.traffic.mean_output
    prompt_seconds = step_times.seconds(0, prompt, 0)
    token_seconds = step_times.seconds(1, 0, prompt + output / 2)
    return Speeds(
        prompt_tokens_per_second=prompt / prompt_seconds,
        stream_tokens_per_second=1 / token_seconds,
        prompt_time_share=prompt_seconds / (prompt_seconds + token_seconds * max(output - 1, 0)),
    )


def _tokens(per_second: float) -> str:
    return f"{formatting.significant(per_second)} tokens/s"


def batch_size(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the throughput by batch size; None where there is no step-time model."""
    cells = [cell for answer in answers for cell in answer.cells]
    rows = [(cell, steps) for cell in cells if (steps := step_seconds(cell))]
    if not rows:
        return None
    mixtures = [(cell, steps) for cell, steps in rows[:-1] if cell.experts is not None]
    sentences = [batching_sentence(cell, steps) for cell, steps in [*mixtures, rows[-1]]]
    return Section(
        slug="batch-size",
        title="Several requests at once",
        sentence=" ".join(sentences),
        grades=("estimated",),
        table=table(
            ("model", "device", *(f"{size} at once" for size in BATCH_SIZES)),
            (
                (cell.model, cell.device_words, *(_batch_words(steps, n) for n in BATCH_SIZES))
                for cell, steps in rows
            ),
            words=("device",),
        ),
        charts=(_chart({cell.name: steps for cell, steps in rows}),),
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
            f"for one user ({_tokens(1 / steps[1])}) and slow for many: {largest} concurrent "
            f"requests give {gain:.1f}x the throughput of one."
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


def _batch_words(steps: dict[int, float], size: int) -> str:
    """Return `169/s, 23 ms`: tokens/s of the batch, seconds of its step; `–`: more than the
    slots."""
    if size not in steps:
        return "–"
    return f"{formatting.significant(size / steps[size])}/s, {formatting.seconds(steps[size])}"


def _chart(steps_by_name: dict[str, dict[int, float]]) -> Chart:
    import altair as alt

    rows: list[Row] = [
        {"model": name, "rows": size, "tokens": size / seconds}
        for name, steps in steps_by_name.items()
        for size, seconds in steps.items()
    ]
    lines = chart_of(rows).mark_line(point=True, strokeWidth=2)
    x = alt.X("rows:Q", title="requests in a step", scale=alt.Scale(type="log", base=2))
    y = alt.Y("tokens:Q", title="tokens/s of all requests")
    color = palette("model:N", series(list(steps_by_name)))
    spec = layered([lines.encode(x=x, y=y, color=color)], 230)
    label = "Tokens per second of all requests together, by the number that share a step, by model."
    return Chart(slug="batch", label=label, spec=spec)
