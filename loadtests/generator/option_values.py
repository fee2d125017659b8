"""What the values of options mean: workloads, arrivals, endpoints, plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from loadtests.errors import LoadError
from loadtests.generator.endpoint import Target, check_target
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.options import (
    FIELDS,
    FLAGS,
    CommandOptions,
    LoadOptions,
    LocustOptions,
    kind_of,
)
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.requests import Workload


def target_of(url: str, options: LoadOptions) -> Target:
    """The endpoint. Raises LoadError naming the option that is wrong."""
    fields = {
        "url": url,
        "model": options.model,
        "api": options.api,
        "api_key_env": options.api_key_env,
        "verify_tls": options.verify_tls,
        "extra_body": parse_extra_body(options.extra_body),
    }
    apis = get_args(get_type_hints(Target)["api"])
    if options.api not in apis:
        raise LoadError(f"--api must be {' or '.join(apis)}, got {options.api!r}")
    try:
        target = msgspec.convert(fields, Target)
    except msgspec.ValidationError as problem:
        raise LoadError(str(problem)) from problem
    check_target(target)
    return target


def plan_of_command(options: CommandOptions) -> LoadPlan:
    """The plan of `crossover load`. Raises LoadError for values that cannot be."""
    return LoadPlan(
        target=target_of(options.url, options),
        workload=parse_workload(options.workload),
        arrivals=parse_arrivals(options.arrivals),
        rate_per_second=options.rate,
        concurrency=options.concurrency,
        window_seconds=options.duration,
        seed=options.seed,
        slo=options.slo,
    )


def plan_of_options(options: Mapping[str, Any], users: int) -> LoadPlan:
    """The plan of Locust's options; "" (an empty field of the page) is the default.

    Raises LoadError for values that cannot be.
    """
    url = options.get("host")
    if not url:
        raise LoadError("no --host: say where to send to, for example --host http://127.0.0.1:8000")
    given = {
        name: _value(name, options[name]) for name in FIELDS if options.get(name) not in (None, "")
    }
    chosen = LocustOptions(**given)
    return LoadPlan(
        target=target_of(url, chosen),
        workload=parse_workload(chosen.workload),
        arrivals=parse_arrivals(chosen.arrivals),
        rate_per_second=chosen.rate,
        concurrency=None if chosen.rate is not None else users,
        window_seconds=chosen.window,
        warmup_seconds=chosen.warmup,
        drain_seconds=chosen.drain,
        seed=chosen.seed,
        requests_file=chosen.requests_file,
        slo=chosen.slo,
    )


def _value(name: str, given: Any) -> Any:
    option, kind = FLAGS[name], kind_of(name)
    if kind is bool:
        if given not in ("yes", "no"):
            raise LoadError(f"{option} must be yes or no, got {given!r}")
        return given == "yes"
    try:
        return kind(given)
    except ValueError as problem:
        raise LoadError(f"{option} must be a number, got {given!r}") from problem


def parse_workload(text: str) -> Workload:
    """ "chat", "chat:512:64" (at most 512 prompt and 64 output tokens) or "256x64" (fixed).

    "chat*0.1:512:64": lengths times 0.1, then the caps. Raises LoadError for anything else.
    """
    try:
        prompt, cross, output = text.partition("x")
        if cross and prompt.isdigit() and output.isdigit():
            return Workload(prompt_tokens=int(prompt), output_tokens=int(output))
        source, *caps = text.split(":")
        preset, times, scale = source.partition("*")
        if len(caps) > 2:
            raise ValueError("at most two caps")
        if wrong := [cap for cap in caps if cap and not cap.isdecimal()]:
            raise ValueError(f"the cap {wrong[0]!r} is no number of tokens")
        limits: list[int | None] = [int(cap) if cap else None for cap in caps] + [None, None]
        return Workload(
            preset=preset,
            scale=float(scale) if times else 1.0,
            max_prompt_tokens=limits[0],
            max_output_tokens=limits[1],
        )
    except ValueError as problem:
        raise LoadError(
            f"--workload {text!r}: {problem}; write a preset (chat), a scale and caps behind it "
            "(chat*0.1:512:64), or 256x64"
        ) from problem


def parse_arrivals(text: str) -> Arrivals:
    """ "poisson", or "gamma:cv=2", "on_off:on_seconds=5:off_seconds=15". Raises LoadError."""
    kind, *settings = text.split(":")
    kinds = [one.__struct_config__.tag for one in get_args(Arrivals)]
    if kind not in kinds:
        raise LoadError(f"--arrivals {text!r} is not one of {', '.join(map(str, kinds))}")
    raw: dict[str, Any] = {"kind": kind}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise LoadError(f"--arrivals {text!r}: {setting!r} is no key=value")
        raw[key] = value
    try:
        found: Arrivals = msgspec.convert(raw, Arrivals, strict=False)
        return found
    except (msgspec.MsgspecError, ValueError) as problem:
        raise LoadError(f"--arrivals {text!r}: {problem}") from problem


def parse_place(option: str, text: str, port: int) -> tuple[str, int]:
    """ "HOST" or "HOST:PORT"; an IPv6 address with a port stands in brackets. Raises LoadError."""
    try:
        if text.count(":") > 1 and not text.startswith("["):
            text = f"[{text}]"
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.netloc == text and "@" not in text:
            return parts.hostname, port if parts.port is None else parts.port
    except ValueError:  # its port is no port
        pass
    raise LoadError(f"{option} must be HOST or HOST:PORT, got {text!r}")


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Fields for every request's body, from a JSON object. Raises LoadError for anything else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.MsgspecError as problem:
        raise LoadError(
            f'--extra-body must be a JSON object such as {{"top_k": 1}}, got {text!r}: {problem}'
        ) from problem
