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

from crossover.loadtests.campaign.campaign_file import Plan, SloSpec, parse_campaign
from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.target import Target
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload

DEFAULT_SECONDS = 90.0
MIN_SECONDS = 30.0
# Parts of the total time. The budget is for single streams and bursts. Bursts may take as long
# again if no step-time model fits the first two; the rest of the time is for that, for starting the
# load generator and for the simulation.
BUDGET_SHARE = 0.45
SINGLE_STREAM_SHARE = 1 / 6
MIN_ANSWER_TOKENS = 32
MIN_PROMPT_TOKENS = 32
TEMPLATE_TOKENS = 32  # allowed for the chat template and the first token of a text


class QuickQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint, the SLO and workload to estimate its capacity for, and the time for it."""

    target: Target
    slo: Slo
    workload: Workload = DEFAULT_WORKLOAD
    seconds: float = DEFAULT_SECONDS  # at most, for measuring and estimating together


def quick_plan(question: QuickQuestion) -> Plan:
    """Return the campaign that answers the question. Raises BadCampaign."""
    seconds = question.seconds
    keys = {
        "name": "quick",
        "budget_seconds": round(seconds * BUDGET_SHARE, 1),
        "wait_seconds": 0,  # there is no time to wait for a quiet machine
        "target": msgspec.to_builtins(question.target),
        "slo": _slo_keys(question.slo),
        "workload": _keys_that_differ(question.workload),
        "search": {
            "confirm": 0,
            "single_stream_seconds": round(seconds * SINGLE_STREAM_SHARE, 1),
        },
    }
    return parse_campaign(_as_toml(keys))


def fitting_workload(workload: Workload, context_tokens: int | None) -> Workload:
    """Return the workload with maximum lengths that fit in the server's context.

    `context_tokens`: None if it is not known; then the workload is returned as it is, and so is one
    that is not a preset. Raises LoadError if no useful request fits.
    """
    prompt, answer = workload.limits
    if context_tokens is None or workload.preset is None or prompt + answer <= context_tokens:
        return workload
    answer = min(answer, max(MIN_ANSWER_TOKENS, context_tokens // 4))
    prompt = min(prompt, context_tokens - answer - TEMPLATE_TOKENS)
    if prompt < MIN_PROMPT_TOKENS:
        raise LoadError(
            f"The server's context of {context_tokens} tokens is too short for requests of this "
            "workload; start it with a longer one."
        )
    return msgspec.structs.replace(
        workload, max_prompt_tokens=int(prompt), max_output_tokens=int(answer)
    )


def _slo_keys(slo: Slo) -> dict[str, Any]:
    """Return the keys of an SLO as a campaign file has them, without limits that are None."""
    keys = SloSpec.__struct_fields__
    return {key: value for key in keys if (value := getattr(slo, key, None)) is not None}


def _keys_that_differ(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that are not its defaults, as a campaign file has them."""
    values = msgspec.to_builtins(struct)
    fields = msgspec.structs.fields(type(struct))
    return {
        field.encode_name: values[field.encode_name]
        for field in fields
        if getattr(struct, field.name) != field.default
    }


def _as_toml(keys: Mapping[str, Any]) -> str:
    """Return the text of a campaign file: one line per key, with tables inline."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in keys.items())


def _toml_value(value: Any) -> str:
    """Return a value as TOML. Strings, numbers, booleans and lists are written as in JSON."""
    if isinstance(value, Mapping):
        pairs = [f"{json.dumps(key)} = {_toml_value(each)}" for key, each in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value)
