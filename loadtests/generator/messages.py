"""What the runner and the load generator say to each other, over one pipe (channel.py).

runner -> load generator    LoadPlan; Stop when the level is decided; the end of the pipe: quit
load generator -> runner    Started; Recorded and Late as they happen; Ended or Failed
a master, besides           Workers while it waits for a plan; WorkerClock during a level
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loadtests.generator.load_plan import LoadPlan
from loadtests.records.schema import RequestRecord


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The level is decided: send nothing more, and end what is on its way."""


class Workers(msgspec.Struct, frozen=True, tag="workers"):
    """These machines' workers are connected, one name for each."""

    names: list[str]


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The clock of the level starts at this moment."""

    unix_seconds: float


class WorkerClock(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """A worker's clock, as it is known since the last message about it.

    Its times + `shift_seconds` are the master's, within `uncertainty_seconds`: the largest so far.
    `offset_seconds` is by how much its date and time of day are ahead of the master's.
    """

    worker: int
    name: str
    shift_seconds: float
    uncertainty_seconds: float
    offset_seconds: float


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """A request has ended."""

    record: RequestRecord


class Late(msgspec.Struct, frozen=True, tag="late"):
    """These requests have waited longer than `late_seconds` for their first token; told once."""

    indices: list[int]


class Ended(msgspec.Struct, kw_only=True, tag="ended"):
    """The account of a level, after its last record."""

    due: int = 0  # requests whose time came
    recorded: int = 0
    gave_up: int = 0  # requests ended by the client at the end of the drain time
    stopped_seconds: float | None = None  # when Stop came; None: the level ran its full time
    cpu_seconds: float = 0.0
    busy_seconds: float | None = None  # at work, or ready for it and without a core; not summed
    wall_seconds: float = 0.0
    processes: int = 1
    worker: int = 0  # of a single load generator
    each: list[Ended] = []  # of a total: the accounts that it sums


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The level cannot be run."""

    problem: str


Order = LoadPlan | Stop
Told = Workers | Started | WorkerClock | Recorded | Late | Ended | Failed


def total(accounts: Iterable[Ended]) -> Ended:
    """The accounts of several load generators as one."""
    many = list(accounts)
    stops = [one.stopped_seconds for one in many if one.stopped_seconds is not None]
    sums = ("due", "recorded", "gave_up", "cpu_seconds")
    return Ended(
        stopped_seconds=min(stops) if stops else None,
        wall_seconds=max(one.wall_seconds for one in many),
        processes=len(many),
        each=many,
        **{name: sum(getattr(one, name) for one in many) for name in sums},
    )
