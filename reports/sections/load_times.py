"""Loading: how long it takes on each device, and what the CPU serves while a GPU loads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import altair as alt

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.cheapest_gpu import GPU_FORMAT
from crossover.reports.answers.model_answers import Grade, ModelAnswer
from crossover.reports.chart_style import (
    ESTIMATED,
    FAINT,
    GPU_ESTIMATED,
    INK,
    Row,
    chart_of,
    layered,
    palette,
)
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.devices.load_seconds import (
    COPY_GB_PER_SECOND,
    START_SECONDS,
    TRANSFER_SHARE,
    predicted_load_seconds,
)
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Chart, Section


def load_times(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the load times; None where none was measured and none can be predicted."""
    predicted = {
        answer.cpu: gpu_load_seconds(answer) for answer in answers if answer.cpu is not None
    }
    cells = [
        cell
        for answer in answers
        for cell in answer.cells
        if cell.load_seconds or predicted.get(cell) is not None
    ]
    if not cells:
        return None
    bridge = _bridge(answers)
    grades: tuple[Grade, ...] = ("measured",)
    note = "Measured: from the start of the engine process until it answered."
    if any(seconds is not None for seconds in predicted.values()):
        grades = ("measured", "predicted")
        note += (
            f" Predicted for the takeover GPU: {START_SECONDS:g} s for its process, then its "
            f"16-bit weights at {COPY_GB_PER_SECOND:g} GB/s, as measured on an H200, or at "
            f"{formatting.share(TRANSFER_SHARE)} of its link if that is slower."
        )
    return Section(
        slug="load-times",
        title="Loading",
        sentence=f"{cells[-1].name} loads in {formatting.seconds(_measured_seconds(cells[-1]))}."
        if bridge is None
        else _sentence(bridge),
        charts=() if bridge is None else (_bridge_chart(bridge),),
        grades=grades,
        table=table_of(
            cells,
            MODEL,
            DEVICE,
            Column("loads in, measured", "seconds", _measured_seconds),
            Column("on the takeover GPU, predicted", "seconds", predicted.get, missing="–"),
            Column("loads measured", "count", lambda cell: len(cell.load_seconds)),
        ),
        note=note,
    )


class BridgedLoad(NamedTuple):
    """What the CPU serves while a GPU loads a model."""

    model: str
    cpu: CellData
    gpu_name: str
    gpu_rate: float | None  # requests/s, once it has loaded; None: not known
    load_seconds: float


def _bridge(answers: Sequence[ModelAnswer]) -> BridgedLoad | None:
    """Return the bridge for the largest model that the CPU serves: to this machine's GPU as
    measured, else to the takeover GPU as predicted; None: no model has both."""
    for answer in reversed(answers):
        cpu, gpu, takeover = answer.cpu, answer.gpu, answer.takeover_gpu
        if cpu is None or not cpu.confirmed_rate:
            continue
        if gpu is not None and (seconds := _measured_seconds(gpu)):
            return BridgedLoad(answer.model, cpu, "this GPU", gpu.confirmed_rate, seconds)
        if takeover is not None and (predicted := gpu_load_seconds(answer)):
            return BridgedLoad(answer.model, cpu, takeover.name, takeover.low, predicted)
    return None


def _sentence(bridge: BridgedLoad) -> str:
    return (
        f"While a GPU loads {bridge.model} for about {formatting.duration(bridge.load_seconds)}, "
        f"this CPU serves {formatting.of_requests(bridge.cpu.confirmed_words)}."
    )


def _bridge_chart(bridge: BridgedLoad) -> Chart:
    """Return a bar for each device over the time since the first request: the CPU serves, while the
    GPU loads, and then the GPU serves."""
    loaded, end = bridge.load_seconds, 2 * bridge.load_seconds
    cpu_words = f"serves {bridge.cpu.confirmed_words}"
    gpu_words = "serves"
    if bridge.gpu_rate:
        like = bridge.cpu.unit_rate if bridge.gpu_rate < 1 else None
        gpu_words = f"serves {formatting.rate(bridge.gpu_rate, rounded='down', like=like)}"
    rows: list[Row] = [
        {"device": "this CPU", "start": 0, "end": end, "what": cpu_words, "kind": "CPU serves"},
        {
            "device": bridge.gpu_name,
            "start": 0,
            "end": loaded,
            "what": f"loads for {formatting.duration(loaded)}",
            "kind": "loads",
        },
        {
            "device": bridge.gpu_name,
            "start": loaded,
            "end": end,
            "what": gpu_words,
            "kind": "GPU serves",
        },
    ]
    colors = {"CPU serves": ESTIMATED, "loads": FAINT, "GPU serves": GPU_ESTIMATED}
    y = alt.Y("device:N", title=None, sort=None, axis=alt.Axis(labelLimit=160))
    bars = (
        chart_of(rows)
        .mark_bar(height=26)
        .encode(
            x=alt.X("start:Q", title="seconds since the first request"),
            x2="end:Q",
            y=y,
            color=palette("kind:N", colors, legend=False),
        )
    )
    words = (
        chart_of(rows)
        .mark_text(align="left", dx=6, color=INK)
        .encode(x="start:Q", y=y, text="what:N")
    )
    label = f"While {bridge.gpu_name} loads {bridge.model}, the CPU serves."
    return Chart(slug="bridge", label=label, spec=layered([bars, words], height=100))


def _measured_seconds(cell: CellData) -> float | None:
    return median(cell.load_seconds) if cell.load_seconds else None


def gpu_load_seconds(answer: ModelAnswer) -> float | None:
    """Return the predicted seconds to start a process and to copy the weights to the takeover GPU.

    None: this machine's GPU was measured, there is no takeover GPU, or its link is not known.
    """
    gpu, spec = answer.takeover_gpu, answer.cell.spec
    if gpu is None or spec is None or answer.gpu is not None:
        return None
    return predicted_load_seconds(device_named(gpu.device), spec, GPU_FORMAT, gpu.devices)
