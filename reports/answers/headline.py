"""The answer in one sentence, and one line about what it rests on.

headline(answers, data)     # "2 cores of an AMD EPYC serve up to ..."
basis(data)                 # workload in tokens, SLO in words, date

The sentence has at most 30 words where one device was measured, 40 where CPU and GPU were.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from crossover.models import formatting
from crossover.models.cpu_names import short_cpu_name
from crossover.reports.answers.binding_limits import may_miss_because_of_others, taken_share_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CPU, GPU, CellData, ReportData
from crossover.serving.capacity.slo import LIMITED_TIMES, Slo


def headline(answers: Sequence[ModelAnswer], data: ReportData) -> str:
    """Return the sentence; it is only about models whose capacity was measured."""
    measured = [answer for answer in answers if any(cell.capacity for cell in answer.cells)]
    if not measured:
        return "Nothing was measured to its end in this run."
    sides = [side for side in (CPU, GPU) if any(answer.cell_on(side) for answer in measured)]
    if len(sides) == 1:
        return _sentence_of_one_device(measured, data, sides[0])
    return _sentence_of_both_devices(measured, data)


def _sentence_of_one_device(measured: Sequence[ModelAnswer], data: ReportData, side: str) -> str:
    """Return the sentence of a run that measured only one device. It names the last model that
    the device serves, and what serves more.

    `measured`: the models with a measured capacity, from fast to slow.
    """
    machine = machine_words(data, side)
    verb = "serve" if re.match(r"\d+ cores ", machine) else "serves"
    if not data.facts.get("url"):
        machine = f"{machine[:1].upper()}{machine[1:]}"
    # Every model has a cell on the only device, so `cells` has the order of `measured`.
    cells = [cell for answer in measured if (cell := answer.cell_on(side)) is not None]
    served_indexes = [index for index, cell in enumerate(cells) if cell.is_served]
    if not served_indexes:
        if not all(_misses_unloaded(cell, data.slo) for cell in cells):
            return _sentence_without_rates(cells, data.slo)
        return f"{machine} {verb} none of these models within the SLO{_needs_gpu(measured[0])}."
    largest_index = served_indexes[-1]
    cell, answer = cells[largest_index], measured[largest_index]
    serves = f"{machine} {verb} up to {cell.model}: {_rate_in_words(cell)}"
    for larger in measured[largest_index + 1 :]:
        if _misses_unloaded(larger.cell_on(side), data.slo):
            return f"{serves}{_needs_gpu(larger)}."
    if answer.takeover is not None and answer.takeover.gpu is not None:
        gpu, priced = answer.takeover.gpu, answer.takeover.price_words
        capacity = f"about {formatting.rate(cell.estimated_rate, like=cell.unit_rate)}"
        above = capacity if cell.confirmed_rate else "that"
        return f"{serves}; above {above} {_article(gpu.name)} {priced} takes over."
    return f"{serves}."


def _sentence_of_both_devices(measured: Sequence[ModelAnswer], data: ReportData) -> str:
    """Return where the CPU stops and this machine's GPU takes over, both measured."""
    served_by_cpu = _served_on(CPU, measured)
    served_by_gpu = _served_on(GPU, measured)
    if not served_by_cpu and not served_by_gpu:
        cells = [cell for answer in measured for cell in answer.cells]
        if all(_misses_unloaded(cell, data.slo) for cell in cells):
            return "Neither the CPU nor the GPU serves one of these models within the SLO."
        return _sentence_without_rates(cells, data.slo)
    gpu_name = f"this machine's {machine_words(data, GPU)}"
    machine = machine_words(data, CPU)
    subject = "The CPU" if machine == "this machine" else f"The CPU ({machine})"
    cpu_serves = f"{subject} serves none of these models within the SLO"
    largest_of_cpu = [*served_by_cpu][-1] if served_by_cpu else None
    if largest_of_cpu is not None:
        rate = _short_rate(served_by_cpu[largest_of_cpu])
        cpu_serves = f"{subject} serves up to {largest_of_cpu.model} at {rate}"
    if not served_by_gpu:
        return f"{cpu_serves}; {gpu_name} serves none of them within the SLO."
    *_, (largest_of_gpu, cell) = served_by_gpu.items()
    gpu_serves = f"{largest_of_gpu.model}: {_both_rates(cell)}"
    if largest_of_cpu is None:
        return f"{cpu_serves}; {gpu_name} serves up to {gpu_serves}."
    # Larger models that only the GPU serves: the CPU misses the SLO, or was not measured with them.
    only_on_gpu = [
        answer.model
        for answer in served_by_gpu
        if measured.index(answer) > measured.index(largest_of_cpu)
    ]
    is_gpu_faster = largest_of_cpu in served_by_gpu and (
        _capacity_or_zero(largest_of_cpu.gpu) > _capacity_or_zero(largest_of_cpu.cpu)
    )
    if is_gpu_faster and only_on_gpu:
        taken_over = f"above that, and for {_listed(only_on_gpu)}"
    elif is_gpu_faster:
        taken_over = "above that"
    elif only_on_gpu:
        taken_over = f"for {_listed(only_on_gpu)}"
    else:
        return f"{cpu_serves}; {gpu_name} serves no more: {gpu_serves}."
    return f"{cpu_serves}; {taken_over}, {gpu_name} takes over ({gpu_serves})."


def _served_on(side: str, measured: Sequence[ModelAnswer]) -> dict[ModelAnswer, CellData]:
    """Return the models that a device serves at some rate, with their configurations on it."""
    cells = {answer: answer.cell_on(side) for answer in measured}
    return {answer: cell for answer, cell in cells.items() if cell and cell.is_served}


def _misses_unloaded(cell: CellData | None, slo: Slo) -> bool:
    """Return whether even single requests missed the SLO, and not because of other processes."""
    if cell is None or cell.capacity is None or may_miss_because_of_others(cell, slo):
        return False
    capacity = cell.capacity
    return capacity.is_none and bool(capacity.state == "misses_slo_unloaded" or capacity.checked)


def _sentence_without_rates(cells: Sequence[CellData], slo: Slo) -> str:
    """Return a sentence which says that no rate is known, and whether other processes may be the
    reason."""
    sentence = "No rate was confirmed or estimated in this run"
    disturbed = [cell for cell in cells if may_miss_because_of_others(cell, slo)]
    taken_shares = [taken_share_of(cell) or 0.0 for cell in disturbed]
    if not taken_shares:
        return f"{sentence}."
    if max(taken_shares) == 0:
        return f"{sentence}, because the machine was never idle."
    return (
        f"{sentence}: other processes took {formatting.share(max(taken_shares))} of the engine's "
        "time. Measure again on an idle machine."
    )


def _capacity_or_zero(cell: CellData | None) -> float:
    return 0.0 if cell is None else cell.estimated_rate or cell.confirmed_rate or 0.0


def _listed(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`; of more than three names the first and the last."""
    if len(names) > 3:
        return f"{names[0]} to {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _rate_in_words(cell: CellData) -> str:
    """Return `23 requests/s, confirmed`, or `about 1.6 requests/s (1.3–1.9), estimated`."""
    if cell.confirmed_rate:
        return f"{formatting.of_requests(cell.confirmed_words)}, confirmed"
    return f"about {formatting.of_requests(cell.estimated_words)}, estimated"


def _short_rate(cell: CellData) -> str:
    """Return `a confirmed 23 requests/s`, or `an estimated 1.6 requests/s`."""
    if cell.confirmed_rate:
        return f"a confirmed {formatting.of_requests(cell.confirmed_words)}"
    return f"an estimated {formatting.requests(cell.estimated_rate, like=cell.unit_rate)}"


def _both_rates(cell: CellData) -> str:
    """Return `23/s confirmed, about 31/s estimated`."""
    rates = []
    if cell.confirmed_rate:
        rates.append(f"{cell.confirmed_words} confirmed")
    if cell.estimated_rate and cell.estimated_rate != cell.confirmed_rate:
        rates.append(f"about {formatting.rate(cell.estimated_rate, like=cell.unit_rate)} estimated")
    return ", ".join(rates)


def _needs_gpu(answer: ModelAnswer) -> str:
    """Return `; llama-3.1-8b needs a GPU: NVIDIA L4 ($0.80/h in bf16 or fp8)`; "" if it ran on a
    GPU."""
    if answer.cpu is None:
        return ""
    priced = "" if answer.takeover is None else answer.takeover.price_words
    name_and_price = f": {priced}" if priced else ""
    return f"; {answer.model} needs a GPU{name_and_price}"


def _article(name: str) -> str:
    return "an" if name[:1].upper() in "AEIOU" or name.startswith("NVIDIA") else "a"


def machine_words(data: ReportData, side: str = CPU) -> str:
    """Return `2 cores of an AMD EPYC`; for the GPU `NVIDIA H200`; for an endpoint its URL."""
    facts = data.facts
    if facts.get("url"):
        return str(facts["url"])
    if side == GPU:
        return "GPU" if data.gpu is None else data.gpu.words
    name = short_cpu_name(str(facts.get("cpu_model") or ""))
    name = f"{_article(name)} {name}" if name else "this machine"
    allowed_cores = facts.get("allowed_cores")  # their number, or their list
    cores = len(allowed_cores) if isinstance(allowed_cores, list | tuple) else allowed_cores
    cores = cores or facts.get("logical_cores")
    counted = "1 core of " if cores == 1 else f"{cores} cores of " if cores else ""
    return f"{counted}{name}"


def whole_machine_words(data: ReportData) -> str:
    """Return the devices that were measured: `16 cores of an Intel Xeon and NVIDIA H200`."""
    names = [machine_words(data, side) for side in data.sides] or [machine_words(data)]
    return " and ".join(dict.fromkeys(names))


def slo_words(slo: Slo) -> str:
    """Return `first token within 2 s, then 200 ms a token, for 90 % of requests`."""
    limits = [
        LIMITED_TIMES[name].words.format(formatting.limit(limit))
        for name, limit in slo.limits.items()
    ]
    return f"{', '.join(limits) or 'no limit'}, for {formatting.share(slo.target)} of requests"


def basis(data: ReportData) -> str:
    """Return what the answer rests on, in a line: lengths of requests, SLO, date."""
    traffics = [cell.traffic for cell in data.cells if cell.traffic is not None]
    requests = "Requests of unknown length"
    if traffics:
        prompt, output = traffics[0].mean_prompt, traffics[0].mean_output
        requests = f"Requests of {prompt:,.0f} + {output:,.0f} tokens (prompt + answer, means)"
    return f"{requests}; SLO: {slo_words(data.slo)}; {data.manifest.created[:10]}"
