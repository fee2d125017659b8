"""Speed against batch at other contexts and TPOT limits, computed here; the page looks it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.accelerator.batching import Batching
from reports.charts.batching import batch_rows
from reports.render.accelerator.speed import best_words

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def contexts_of(found: Sequence[Batching]) -> list[int]:
    """Tokens of each stream: what was measured first, then longer ones up to the slots' context."""
    most = max((one.cell.context_tokens or 0 for one in found), default=0)
    own = max((one.context_tokens for one in found), default=0)
    return [own, *(tokens for tokens in CONTEXTS if own < tokens <= most)]


def batch_lattice(
    found: Sequence[Batching], limits_seconds: Sequence[float | None]
) -> dict[str, Any]:
    """By cell and context: seconds of a step by streams (law, roofline); by limit: best batch.

    The first context is what was measured: that of each cell.
    """
    contexts = contexts_of(found)
    return {
        "contexts": [
            {"value": tokens, "text": f"{tokens:,} tokens" if place else "as measured"}
            for place, tokens in enumerate(contexts)
        ],
        "cells": [
            {
                "key": one.cell.key,
                "most": one.most,
                "points": [
                    _at(one, tokens if place else one.context_tokens, limits_seconds)
                    for place, tokens in enumerate(contexts)
                ],
            }
            for one in found
        ],
    }


def _at(one: Batching, context: int, limits_seconds: Sequence[float | None]) -> dict[str, Any]:
    return {
        "lines": batch_rows(one, context, None)["lines"],
        "best": [batch_rows(one, context, limit)["best"] for limit in limits_seconds],
        "words": [best_words(one, limit, context) for limit in limits_seconds],
    }
