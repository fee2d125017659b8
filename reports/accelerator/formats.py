"""Weight formats of one model side by side: speed, memory, quality."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from reports.accelerator.phases import Phase, PhaseName, phases_of
from reports.numbers import CellNumbers, RunNumbers
from reports.planning.predict import known_weight_bytes


class FormatRow(msgspec.Struct, frozen=True, kw_only=True):
    """One format of one model with one engine. Tokens/s; missing is None."""

    model: str
    weight_format: str
    backend: str
    weight_bytes: int | None  # as the file has them: predicted
    kl_nats: float | None
    prompt_tokens_per_second: float | None
    decode_tokens_per_second: float | None  # one stream
    decode_slots_tokens_per_second: float | None
    cell: CellNumbers | None  # None: looked at for seconds and not chosen
    measured_on: str = ""  # the model that was measured, where the figures are scaled from another


def formats_of(run: RunNumbers) -> list[FormatRow]:
    """Of the models that the run has several formats of, smallest model and weights first."""
    phases = {(one.cell.key, one.name): one for one in phases_of(run)}
    rows: dict[tuple[str, str, str], FormatRow] = {}
    for cell in run.cells:
        for row in (*_measured(cell, phases), *_looked_at(cell)):
            rows.setdefault((row.model, row.weight_format, row.backend), row)
    kept = []
    for model in dict.fromkeys(row.model for row in rows.values()):
        own = [row for row in rows.values() if row.model == model]
        if len({row.weight_format for row in own}) > 1:
            kept += sorted(own, key=lambda row: (row.weight_bytes or 0, row.backend))
    return kept


def _measured(cell: CellNumbers, phases: dict[tuple[str, PhaseName], Phase]) -> Iterator[FormatRow]:
    def speed(phase: PhaseName) -> float | None:
        found = phases.get((cell.key, phase))
        return None if found is None else found.tokens_per_second

    if cell.levels:
        yield FormatRow(
            model=cell.model,
            weight_format=cell.weight_format,
            backend=cell.backend,
            weight_bytes=known_weight_bytes(cell.spec, cell.weight_format),
            kl_nats=cell.quality_kl_nats,
            prompt_tokens_per_second=speed("prefill"),
            decode_tokens_per_second=speed("decode, one stream"),
            decode_slots_tokens_per_second=speed("decode, all slots"),
            cell=cell,
        )


def _looked_at(cell: CellNumbers) -> Iterator[FormatRow]:
    """The engines that a cell's engine was chosen from."""
    for one in cell.choice.engines if cell.choice is not None else ():
        if not one.is_chosen and one.decode_tokens_per_second is not None:
            yield FormatRow(
                model=cell.model,
                weight_format=one.weight_format,
                backend=one.backend,
                weight_bytes=known_weight_bytes(cell.spec, one.weight_format),
                kl_nats=None,
                prompt_tokens_per_second=one.prompt_tokens_per_second,
                decode_tokens_per_second=one.decode_tokens_per_second,
                decode_slots_tokens_per_second=one.decode_slots_tokens_per_second,
                cell=None,
                measured_on=one.measured_on,
            )


def kind_words(one: FormatRow) -> str:
    """Measured with the model itself, or scaled from a smaller one."""
    if one.measured_on:
        return f"predicted: measured on {one.measured_on} and scaled"
    return "measured here"
