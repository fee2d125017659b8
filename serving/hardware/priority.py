"""Lowers the priority of a process that shares its cores: nice, and that of its autogroup.

Where the kernel groups tasks by session (CONFIG_SCHED_AUTOGROUP, on in most distributions), nice
values count inside a session only, and sessions share a core equally: sched(7). An engine has a
session of its own, so that group's nice value is what HTTP and load generator are weighed against.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
_WAIT_SECONDS = 0.11  # the kernel takes one such write in 100 ms from those without rights


def lower_priority(nice: int, autogroup: Path = AUTOGROUP) -> str | None:
    """By `nice`: of this thread, of those that it starts from now on, and of its session.

    None when done; why not, where sessions are groups and this one's cannot be lowered.
    """
    os.nice(nice)
    problem = ""
    for _ in range(3):
        try:
            autogroup.write_text(str(nice))
            return None
        except FileNotFoundError:  # this kernel has no such groups
            return None
        except BlockingIOError as error:
            problem = str(error)
            time.sleep(_WAIT_SECONDS)
        except OSError as error:
            problem = str(error)
            break
    return f"the priority of the engine's session cannot be lowered: {problem}"
