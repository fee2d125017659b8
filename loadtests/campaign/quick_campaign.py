"""The campaign behind `crossover quick`: a server that runs, estimated in a minute and a half.

    plan = quick_plan(QuickQuestion(target=Target(url="http://127.0.0.1:8080"), slo=slo))

It is a campaign like any other, with its run folder, so that `report` and `campaign resume
--confirm` go on with it. It measures single requests and the two bursts of a calibration, and no
level: what it says is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from crossover.loadtests.campaign.campaign_file import Plan, parse_campaign
from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.openai_endpoint import Target
from crossover.serving.capacity.slo import LIMITS, Slo
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload

DEFAULT_SECONDS = 90.0
MIN_SECONDS = 30.0
SINGLE_STREAM_SHARE = 1 / 6  # of the time, for requests one at a time
# Bursts may take what is left of the budget, and as long again where the first two do not fit: the
# rest of the time is for starting the load generator and for the simulation.
BUDGET_SHARE = 0.45
MIN_ANSWER_TOKENS = 32


class QuickQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of which endpoint."""

    target: Target
    slo: Slo
    workload: Workload = DEFAULT_WORKLOAD
    seconds: float = DEFAULT_SECONDS  # at most, of measuring and estimating


def quick_plan(question: QuickQuestion) -> Plan:
    """Return the campaign that answers the question. Raises BadCampaign."""
    seconds = question.seconds
    given = {
        "name": "quick",
        "budget_seconds": round(seconds * BUDGET_SHARE, 1),
        "disturbance": "ignore",  # there is no time to wait for a quiet machine
        "target": msgspec.to_builtins(question.target),
        "slo": _slo_keys(question.slo),
        "workload": _keys_that_differ(question.workload),
        "search": {
            "confirm": 0,
            "single_stream_seconds": round(seconds * SINGLE_STREAM_SHARE, 1),
        },
    }
    return parse_campaign(_as_toml(given))


def fitting_workload(workload: Workload, context_tokens: int | None) -> Workload:
    """Return the workload with caps that a context of so many tokens has room for; None: any.

    Raises LoadError where no useful request fits.
    """
    prompt, answer = workload.limits
    if context_tokens is None or workload.preset is None or prompt + answer <= context_tokens:
        return workload
    answer = min(answer, max(MIN_ANSWER_TOKENS, context_tokens // 4))
    # The chat template and the first token of a text take some.
    prompt = min(prompt, context_tokens - answer - MIN_ANSWER_TOKENS)
    if prompt < MIN_ANSWER_TOKENS:
        raise LoadError(
            f"The server's context of {context_tokens} tokens is too short for requests of this "
            "workload; start it with a longer one."
        )
    return msgspec.structs.replace(
        workload, max_prompt_tokens=int(prompt), max_output_tokens=int(answer)
    )


def _slo_keys(slo: Slo) -> dict[str, Any]:
    keys = ("name", *LIMITS.values(), "target")
    return {key: value for key in keys if (value := getattr(slo, key)) is not None}


def _keys_that_differ(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that are not its defaults, as a campaign file has them."""
    values = msgspec.to_builtins(struct)
    fields = msgspec.structs.fields(type(struct))
    return {
        field.encode_name: values[field.encode_name]
        for field in fields
        if getattr(struct, field.name) != field.default
    }


def _as_toml(given: Mapping[str, Any]) -> str:
    """Return a campaign's text: tables of one level in their own lines, deeper ones inline."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in given.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {pairs} }}"
    return json.dumps(value)
