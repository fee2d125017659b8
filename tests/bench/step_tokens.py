"""How much an estimate changes with the tokens that a step may have.

    python -m tests.bench.step_tokens docs/results/demo docs/results/llama-server

Until November 2026 the simulation gave steps 2,048 tokens where the engines on a CPU take 512. For
the step-time models of these runs, the capacity with either: for the run's own lengths, and for the
whole lengths of the presets. A ratio of 1.00 means that no prompt filled a step of 512 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from crossover.loadtests.campaign.resume_state import campaign_of
from crossover.loadtests.records.journal_events import Calibrated, of_kind
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    Demand,
    SimulatedCapacity,
)
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.workload.request_lengths import Workload

STEP_TOKENS = (2048, 512)
PRESETS = ("sharegpt", "chat")


def main(folders: list[str]) -> None:
    print("| configuration | lengths, SLO | requests/s with 2,048 | with 512 | ratio |")
    print("|---|---|---|---|---|")
    for folder in folders:
        run = read_records(Path(folder))
        campaign, _ = campaign_of(run.manifest)
        questions = [("own", campaign.workload, campaign.slo)] + [
            (preset, Workload(preset=preset), SLO_PRESETS[slo])
            for preset in PRESETS
            for slo in ("reading", "batch")
        ]
        for made in of_kind(run.events, Calibrated):
            if made.server is None:
                continue
            server = made.server.slower(LOADED)
            settings_tried = [
                msgspec.structs.replace(server.settings, step_tokens=tokens)
                for tokens in STEP_TOKENS
            ]
            for name, workload, slo in questions:
                found: list[SimulatedCapacity] = [
                    msgspec.structs.replace(server, settings=settings).capacity(
                        Demand(workload), slo
                    )
                    for settings in settings_tried
                ]
                before, after = (one.rate for one in found)
                ratio = f"{after / before:.2f}" if before else "-"
                print(
                    f"| {made.cell} | {name}, {slo.name} | {before:.4f} | {after:.4f} | {ratio} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
