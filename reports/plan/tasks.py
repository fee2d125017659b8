"""The tasks that people use a model for: their requests, their SLO, and how long they think between
two requests. `crossover size --task` names one.

    task_named("rag").workload        # Workload(preset="rag")
"""

from __future__ import annotations

import msgspec

from crossover.reports.errors import ReportError
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.slo import SLO_PRESETS, Slo
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one user does."""

    name: str
    does: str  # "chat": 50 users who chat
    one_does: str  # "chats": 1 user who chats
    workload: Workload
    slo: Slo
    # From the end of an answer to the next request. None: the workload has conversations, with
    # think times of their own.
    think_seconds: float | None = None
    source: str  # of the lengths and the think time

    @property
    def mean_think_seconds(self) -> float:
        """The mean time that a user thinks before a request."""
        if self.think_seconds is not None:
            return self.think_seconds
        return Demand(self.workload).lengths().mean_think_seconds


TASKS = {
    task.name: task
    for task in (
        Task(
            name="chat",
            does="chat",
            one_does="chats",
            workload=DEFAULT_WORKLOAD,
            slo=SLO_PRESETS["chat"],
            think_seconds=45.0,
            source="Lengths of Azure's conversation trace of 2023, capped at 1,024 and 256 tokens "
            "as campaigns do by default; think time of inference-perf's interactive-chat.",
        ),
        Task(
            name="rag",
            does="ask about documents that a search found (RAG)",
            one_does="asks about documents that a search found (RAG)",
            workload=Workload(preset="rag"),
            slo=SLO_PRESETS["chat"],
            think_seconds=40.0,
            source="Lengths of RAGPulse, question answering at a university; the think time is the "
            "median time between two requests of one of its sessions.",
        ),
        Task(
            name="agent",
            does="run an agent each",
            one_does="runs an agent",
            workload=Workload(preset="agent"),
            slo=SLO_PRESETS["agent"],
            source="Lengths, turns and tool times of inference-perf's deep-research.",
        ),
        Task(
            name="summarise",
            does="have documents summarized",
            one_does="has documents summarized",
            workload=Workload(preset="summarise"),
            slo=SLO_PRESETS["reading"],
            think_seconds=60.0,
            source="Lengths of arXiv summarization, as published with Vidur; the think time is the "
            "reading of a summary of 300 tokens at the 5 tokens/s of the SLO.",
        ),
        Task(
            name="code",
            does="have code completed",
            one_does="has code completed",
            workload=Workload(preset="code"),
            slo=SLO_PRESETS["interactive"],
            think_seconds=15.0,
            source="Lengths of Azure's code trace of 2023; think time of inference-perf's "
            "code-generation.",
        ),
    )
}


def task_named(name: str) -> Task:
    """Return the task of this name. Raises ReportError, which lists all tasks."""
    if name not in TASKS:
        raise ReportError(f"Task {name!r} does not exist. Available tasks: {', '.join(TASKS)}.")
    return TASKS[name]
