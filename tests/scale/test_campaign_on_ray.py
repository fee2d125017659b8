"""`crossover campaign run --on ray` on two nodes of Ray, one of which is killed, and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.campaign.campaign_file import read_campaign
from loadtests.campaign.manifest import manifest_of
from loadtests.campaign.progress import Progress
from loadtests.ray.nodes import Node
from loadtests.records.events import CellFinished, Interrupted, RunFinished, RunResumed, of_kind
from loadtests.records.old_run_folder import RunFolder, read_events
from serving.hardware.facts import hardware_facts
from tests.end_to_end.test_campaign import FAKE, ROOT, only_folder
from tests.loadtests.campaign.checks import check_folder
from tests.scale.conftest import REASON, Nodes
from tests.tools.waiting import wait_for

pytest.importorskip("ray", reason=REASON)
pytestmark = [pytest.mark.slow, pytest.mark.scale, pytest.mark.timeout(600)]

TASK = "ray::measure_here"
LADDER = FAKE.replace('models = ["135m"]', 'models = ["135m", "360m", "1b"]').replace(
    "budget_seconds = 5", "budget_seconds = 12"
)


class Campaign:
    """The command line, with the two nodes."""

    def __init__(self, folder: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        monkeypatch.setenv("CROSSOVER_CACHE", str(folder / "cache"))
        self._log = folder / "log"
        self.out = folder / "runs"
        self.file = folder / "ladder.toml"
        self.file.write_text(LADDER)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "crossover", "campaign", *arguments]
        with open(self._log, "ab") as log:
            # Two nodes are one machine here, so what measures alone on a machine has to be told.
            return subprocess.Popen(
                [*command, "--on", "ray", "--beside-others"],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def run(self) -> subprocess.Popen[bytes]:
        return self.start("run", str(self.file), "--out", str(self.out))


def finished(folder: Path) -> list[str | None]:
    return [event.cell for event in of_kind(read_events(folder).records, CellFinished)]


def test_a_lost_node_loses_its_cell_and_a_stopped_run_is_resumed(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = Campaign(tmp_path, nodes, monkeypatch)
    running = campaign.run()
    wait_for(lambda: nodes.workers(0, TASK) and nodes.workers(1, TASK), 200)
    nodes.kill(1)  # its cell is measured again on the other node
    folder = wait_for(lambda: only_folder(campaign.out))
    wait_for(lambda: finished(folder), 120)
    (lost,) = wait_for(lambda: of_kind(read_events(folder).records, Interrupted))
    assert lost.cell is not None and "lost with node" in lost.reason
    wait_for(lambda: nodes.workers(0, TASK))
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 2 and "campaign resume" in campaign.said
    first = finished(folder)
    assert campaign.start("resume", str(folder)).wait(120) == 0, campaign.said
    events = read_events(folder).records
    assert len(finished(folder)) == 3 and finished(folder)[: len(first)] == first
    assert of_kind(events, RunResumed) and of_kind(events, RunFinished)
    check_folder(folder)


def test_a_node_whose_process_dies_first_is_lost_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says that the process is gone; the cell is given to the same node, which is gone, too."""
    from ray.exceptions import NodeDiedError, WorkerCrashedError

    from loadtests.ray import campaign

    (tmp_path / "ladder.toml").write_text(LADDER)
    plan = read_campaign(tmp_path / "ladder.toml")
    nodes = [Node(key, "127.0.0.1", 1) for key in "ab"]
    monkeypatch.setattr(campaign, "living_nodes", lambda: [{"NodeID": one.key} for one in nodes])
    manifest = manifest_of(plan, "run", hardware_facts(), ())
    cell = plan.cells[0]
    with RunFolder.create(tmp_path / "run", manifest) as opened, Progress() as progress:
        run = campaign.Run(opened, plan.campaign, nodes, [])
        work = campaign._Work([run], progress, (), False)
        work._lost(run, cell, nodes[1], WorkerCrashedError())
        assert run.waiting == [cell] and run.nodes == nodes
        run.waiting.clear()
        work._lost(run, cell, nodes[1], NodeDiedError("it is gone"))
        assert run.waiting == [cell] and run.nodes == nodes[:1]
        run.waiting.clear()
        work._lost(run, cell, nodes[0], WorkerCrashedError())
        assert not run.waiting, "two nodes were lost with it"
