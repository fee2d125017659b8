"""A load generator: a child process with Locust in it, and the runner's end of its pipe.

    with LoadGenerator(log=path, cores=layout.client) as generator:
        for told in generator.run(plan):         # Started, RequestRecords, Late, None ..., Ended
            ...
            generator.stop()                     # the level is decided

It stays for one level after the other. With `processes`, so many children send their shares of
one arrival process from the same moment; with `listen`, Locust's workers on other machines do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadtests.load_generator.load_plan import LoadPlan, Told

TICK_SECONDS = 0.1


class LoadGenerator:
    """Starts at once and imports Locust while its parent goes on. Raises LoadError."""

    pids: tuple[int, ...]  # of the children, for the sampler

    def __init__(
        self,
        *,
        log: Path | None = None,
        cores: tuple[int, ...] = (),
        processes: int = 1,
        listen: tuple[str, int] | None = None,
        expect_workers: int = 1,
    ) -> None:
        raise LookupError

    def run(self, plan: LoadPlan) -> Iterator[Told]:
        """What it tells of a level as it comes, and None about every TICK_SECONDS.

        The last is Ended. Left early (an exception, a break), the level is given up and heard out
        before the next. Raises LevelInterrupted when it fails, loses requests or its process ends.
        """
        raise LookupError

    def stop(self) -> None:
        """The level is decided: nothing more is sent, and what is on its way is ended."""

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None: ...
