"""What `crossover quick` says of a server, in words.

lines_of(answer)        # for a terminal
markdown_of(answer)     # a block to paste
"""

from __future__ import annotations

from collections.abc import Iterator

from crossover.loadtests.capacity import capacity_text
from crossover.models import formatting
from crossover.reports.answers.headline import slo_words
from crossover.reports.answers.quick_answer import QuickAnswer, Users
from crossover.reports.render.markdown import without_markup
from crossover.serving.capacity.binding_limit import sentence_of


def rows_of(answer: QuickAnswer) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the answer: the quantity, its value, and its grade or what it rests on."""
    requests = "1 request" if answer.requests == 1 else f"{answer.requests} requests"
    times = (
        f"TTFT {formatting.seconds(answer.ttft_seconds)}, "
        f"TPOT {formatting.seconds(answer.tpot_seconds)}"
    )
    grade = f"measured, medians of {requests} one at a time"
    if (single := answer.single_request) is not None:
        tpot = formatting.seconds(answer.tpot_seconds)
        times = f"{single.words}; TPOT {tpot}"
        grade = f"from the step times{single.check_words}; TPOT measured, median of {requests}"
    yield "Single request", times, grade
    capacity = answer.capacity
    if answer.grade != "estimated" or capacity is None:
        advice = "" if capacity is None else capacity.advice
        words = ". ".join(filter(None, (f"none: {answer.reason}".rstrip("."), advice)))
        yield "Estimated capacity", words, ""
    else:
        rate = formatting.of_requests(capacity_text.estimate_words(capacity, answer.unit_rate))
        yield "Estimated capacity", rate, "estimated, 90 % confidence interval"
    if answer.users is not None:
        think = formatting.seconds(answer.users.think_seconds)
        yield (
            "Concurrent users",
            _users_in_words(answer.users),
            f"estimated; each waits for the answer, then reads and thinks for {think}",
        )
    if answer.binding is not None:
        is_unloaded = capacity is not None and capacity.state == "misses_slo_unloaded"
        is_measured = is_unloaded or answer.binding.kind == "other_processes"
        method = "measured" if is_measured else "simulated"
        yield "Binding limit", sentence_of(answer.binding, answer.unit_rate), method
    gpu = answer.takeover
    if gpu.name is None:
        yield "Takeover GPU", gpu.reason, ""
    else:
        rate = formatting.requests(gpu.rate, like=answer.unit_rate)
        price = formatting.dollars_per_hour(gpu.dollars_per_hour)
        words = f"{gpu.name}: {rate}, {price} in {gpu.weight_format}"
        if gpu.narrow_name is not None:
            words += f"; in {gpu.narrow_format} {gpu.narrow_name}"
        yield "Takeover GPU", words, "predicted"


def _users_in_words(users: Users) -> str:
    """Return `about 110 (92–130)`."""
    return f"about {formatting.with_interval(users.estimate, users.low, users.high)}"


def basis_of(answer: QuickAnswer) -> str:
    """Return what the answer rests on, in a line."""
    lengths = answer.workload
    if answer.mean_prompt_tokens is not None and answer.mean_output_tokens is not None:
        lengths = (
            f"requests of {answer.mean_prompt_tokens:.0f} + {answer.mean_output_tokens:.0f} tokens "
            "(prompt + answer, means)"
        )
    return f"SLO {answer.slo.name}: {slo_words(answer.slo)}; {lengths}"


def lines_of(answer: QuickAnswer) -> list[str]:
    """Return the answer for a terminal."""
    rows = list(rows_of(answer))
    width = max(len(quantity) for quantity, _, _ in rows)
    lines = [f"{answer.model} on {answer.software} at {answer.url}", basis_of(answer), ""]
    for quantity, value, grade in rows:
        lines.append(f"{quantity:<{width}}  {value}{f'  [{grade}]' if grade else ''}")
    lines += [f"note: {note}" for note in answer.notes]
    return lines


def markdown_of(answer: QuickAnswer) -> str:
    """Return the answer as a block of Markdown to paste."""
    lines = [
        f"**{_plain(answer.model)}** on {answer.software}, `crossover quick`, "
        f"{answer.created[:10]}. {basis_of(answer)}.",
        "",
        "| | | |",
        "|---|---|---|",
    ]
    lines += [f"| {' | '.join(map(_plain, row))} |" for row in rows_of(answer)]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a name or sentence without what would end a cell or a line of Markdown."""
    return without_markup(" ".join(text.split()).replace("|", "/"))
