"""Which cores the engine gets and which the HTTP side: pure decisions over core numbers.

An engine's threads spin while they wait for each other; one more busy process on the same core makes a step several times slower. So where
there are two cores or more, the last one is kept for HTTP (and whoever runs beside), unless the user says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from serving.errors import ServingError


class CoreSplit(msgspec.Struct, frozen=True):
    """Core numbers of the engine and of the HTTP process, the engine's threads, and a line that says why."""

    engine: tuple[int, ...]
    api: tuple[int, ...]
    threads: int
    note: str


def split_cores(
    allowed: tuple[int, ...],
    engine: tuple[int, ...] = (),
    api: tuple[int, ...] = (),
    threads: int | None = None,
    siblings: Mapping[int, int] | None = None,
) -> CoreSplit:
    """Divide the allowed cores. `engine`, `api`: what the user asked for; empty: decide.

    `siblings` maps a core to the physical core it belongs to (see `physical_of`): the engine gets one thread for each physical core,
    since a second one on the same core only competes for its vector units. Raises ServingError for a core that is not allowed.
    """
    for name, wanted in (("--cores", engine), ("--api-cores", api)):
        outside = [core for core in wanted if core not in allowed]
        if outside:
            raise ServingError(f"{name} names core {outside[0]}, which this process may not use; allowed: {cores_text(allowed)}")
    if engine:
        rest = tuple(core for core in allowed if core not in engine)
        chosen_api, why = (api or rest or allowed), "as asked"
        if not api:
            why = "the rest for HTTP" if rest else "HTTP shares them"
    elif api:
        rest = tuple(core for core in allowed if core not in api)
        engine, chosen_api, why = rest or allowed, api, "the rest for the engine" if rest else "shared by both: no core is left over"
    elif len(allowed) >= 2:
        engine, chosen_api, why = allowed[:-1], allowed[-1:], "one core kept for HTTP; --cores and --api-cores change that"
    else:
        engine, chosen_api, why = allowed, allowed, "one core for everything: times will be worse than the engine's own"
    physical = len({(siblings or {}).get(core, core) for core in engine})
    count = threads if threads is not None else physical
    if count < 1:
        raise ServingError(f"--threads must be at least 1, got {count}")
    note = f"engine on {_many(engine)} with {count} thread{'' if count == 1 else 's'}, HTTP on {_many(chosen_api)} ({why})"
    return CoreSplit(engine, chosen_api, count, note)


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-3,5" -> (0, 1, 2, 3, 5); "" -> (). Raises ServingError for anything else."""
    cores: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)) or int(last or first) > 1 << 16:
            raise ServingError(f"{text!r} is no list of cores; write for example 0-3 or 0,2,4")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def cores_text(cores: Iterable[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def physical_of(cores: Iterable[int], root: Path = Path("/")) -> dict[int, int]:
    """Core -> the lowest-numbered core that shares its physical core; a core the kernel says nothing of stands for itself."""
    table: dict[int, int] = {}
    for core in cores:
        try:
            text = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip()
            table[core] = min(parse_cores(text))
        except (OSError, ValueError, ServingError):
            table[core] = core
    return table


def _many(cores: tuple[int, ...]) -> str:
    return f"core{'' if len(cores) == 1 else 's'} {cores_text(cores)}"
