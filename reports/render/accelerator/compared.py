"""Weight formats side by side."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from models.formatting import NOT_MEASURED, model_title
from reports.accelerator.formats import FormatRow, kind_words
from reports.render.accelerator.section import Section
from reports.render.tables import significant, state_words, table_of

FORMATS_NOTE = (
    "Weights as a file of that format has them. KL: the mean divergence of next-token "
    "probabilities from the float model's, where the conversion measured it. Formats that were "
    "looked at for seconds and not chosen have no capacity."
)


def formats_section(found: Sequence[FormatRow]) -> Section:
    """Speed, memory and quality of each format."""
    return Section(
        slug="formats",
        title="Formats side by side",
        finding=" ".join(_words(found)) or f"Several formats of one model: {NOT_MEASURED}.",
        note=FORMATS_NOTE if found else "",
        sources=("measured here", "predicted"),
        group="formats",
        table=table_of(
            found,
            [
                ("model", False, lambda one: model_title(one.model)),
                ("format", False, lambda one: one.weight_format),
                ("engine", False, lambda one: one.backend),
                ("weights (predicted)", True, lambda one: formatting.size(one.weight_bytes)),
                ("KL", True, lambda one: significant(one.kl_nats, " nats")),
                ("prompt tokens/s", True, lambda x: significant(x.prompt_tokens_per_second)),
                ("tokens/s, one stream", True, lambda x: significant(x.decode_tokens_per_second)),
                (
                    *("tokens/s, all slots", True),
                    lambda one: significant(one.decode_slots_tokens_per_second),
                ),
                (
                    *("capacity", False),
                    lambda one: NOT_MEASURED if one.cell is None else state_words(one.cell),
                ),
                ("speeds are", False, kind_words),
            ],
        ),
    )


def _words(found: Sequence[FormatRow]) -> list[str]:
    """Of each model the format that decodes one stream fastest, and the smallest."""
    said = []
    for model in dict.fromkeys(one.model for one in found):
        known = [one for one in found if one.model == model and one.decode_tokens_per_second]
        if len(known) < 2:
            continue
        best = max(known, key=lambda one: one.decode_tokens_per_second or 0.0)
        prompt = max(known, key=lambda one: one.prompt_tokens_per_second or 0.0)
        text = (
            f"{model_title(model)}: one stream decodes fastest in {_name(best)} "
            f"({significant(best.decode_tokens_per_second)} tokens/s)"
        )
        if prompt is not best and prompt.prompt_tokens_per_second:
            text += (
                f", prompts are computed fastest in {_name(prompt)} "
                f"({significant(prompt.prompt_tokens_per_second)} tokens/s)"
            )
        said.append(f"{text}.")
    return said


def _name(one: FormatRow) -> str:
    return f"{one.weight_format} with {one.backend}"
