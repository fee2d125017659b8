"""What a rate costs at other prices and SLOs: the words computed here, the products in the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from reports.accelerator.costs import Comparison, priced, prices_of
from reports.charts.costs import even_rows
from reports.render.accelerator.money import cost_words, dollars
from reports.sentences import title


def cost_lattice(
    found: Sequence[Comparison], held: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """By cell: its sides, and for each price the words; beside the run's SLO without any GPU.

    `held`: the rates that are confirmed under some SLO, by cell. What GPUs hold is predicted for
    the SLO of the run only.
    """
    own = next((one.here.dollars_per_hour for one in found), None)
    prices = prices_of(own)
    return {
        "prices": [{"value": price, "text": f"{dollars(price)}/h"} for price in prices],
        "own": prices.index(own) if own is not None else None,
        "cells": [
            {
                "key": one.cell.key,
                "name": title(one.cell),
                "output_tokens": one.output_tokens,
                "rates": one.rates,
                "source": one.here.price_source,
                "watts": one.here.watts,
                "watts_source": one.here.watts_source,
                "there": [
                    {
                        "name": side.name,
                        "held": side.held,
                        "holds": side.holds,
                        "price": side.dollars_per_hour,
                        "watts": side.watts,
                        "watts_source": side.watts_source,
                        "kind": side.kind,
                        "source": side.price_source,
                    }
                    for side in one.there
                ],
                "own": _point(one, prices, one.here.held),
                "points": [
                    _point(msgspec.structs.replace(one, there=()), prices, rate)
                    for rate in held[one.cell.key]
                ],
            }
            for one in found
        ],
    }


def _point(one: Comparison, prices: Sequence[float], held: float) -> dict[str, Any]:
    moved = [priced(one, price, held) for price in prices]
    return {
        "held": held,
        "holds": moved[0].here.holds,
        "words": [cost_words(each) for each in moved],
        "even": [even_rows(each.soonest[1] if each.there else None) for each in moved],
    }
