"""The endpoint under load as users name it, and what a probe found out about it.

    target = Target(url="http://127.0.0.1:8000")
    check_target(target)

Plans and reports read these from a run folder, so this module does not load gevent.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from crossover.loadtests.errors import TargetUnusable
from crossover.loadtests.load_generator.endpoint_access import Access, with_references
from crossover.serving.option_help import Positive

UNCHECKED = "the server's certificate was not checked (--insecure)"  # a note


class Target(Access, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The endpoint to load: a table of a campaign, and options of `crossover load`."""

    url: str
    model: str | None = None
    api: Literal["completions", "chat"] = "completions"
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}
    timeout_seconds: Positive = 600.0
    ready_seconds: Positive = 60.0


def check_target(target: Target) -> None:
    """Raise TargetUnusable if the URL is not valid or contains a password, or if a field has bytes
    that are not UTF-8, which the run folder could not record.
    """
    for name in Target.__struct_fields__:
        try:
            msgspec.json.encode(getattr(target, name))
        except UnicodeEncodeError:
            raise TargetUnusable(
                f"{name} {getattr(target, name)!r} has bytes that are not UTF-8. Write them as %FF "
                "in a URL"
            ) from None
    from crossover.loadtests.load_generator.http_connection import connect  # loads gevent

    connect(target.url, access=target)


def with_private_values_kept(target: Target) -> Target:
    """Return a target of the command line as a run folder may record it: its headers and the query
    of its URL are references to variables of this process."""
    referenced, url = with_references(target, target.url)
    return msgspec.structs.replace(referenced, url=url)


class TargetFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an endpoint supports, as its probe showed."""

    model: str
    usage: bool  # token counts at the end of a stream
    continuous_usage: bool  # token counts in every chunk
    ignore_eos: bool  # answers have the requested length
    length_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    is_greedy: bool = True  # requests set temperature 0; False: the endpoint refuses that
    backend: str | None = None  # X-Crossover-Backend
    word_tokens: float = 1.0  # tokens per word of the generated prompts
    fixed_tokens: float = 0.0  # tokens added to every prompt: BOS, chat template
    notes: list[str] = []
    api: Literal["completions", "chat"] = "completions"  # the route


def route_words(facts: TargetFacts) -> str:
    """Return the route of requests and how answers end, as a phrase; "" if both are the default."""
    parts = []
    if facts.api == "chat":
        parts.append("requests go through the model's chat template (/v1/chat/completions)")
    if facts.ignore_eos:
        if parts:
            parts.append("answers have the workload's lengths (ignore_eos)")
    elif not any("ignore_eos" in note for note in facts.notes):
        parts.append(
            "answers end where the model ends them, but are no longer than the workload's lengths"
        )
    return "; ".join(parts)
