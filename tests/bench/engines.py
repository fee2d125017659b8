"""Two engines of half of the cores beside one engine of all of them, behind the same queue.

    python -m tests.bench.engines 135m:onnx:int8 360m:onnx:int8 135m:llama_cpp:Q4_0 [--seconds 100]

For each model, engine and format: a campaign with one engine of 16 slots, then one with two engines
of 8 slots each, as `crossover run` makes it. A row has the medians of single streams, the load
levels as measured, and the confirmed and the estimated capacity.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from crossover.loadtests.campaign.campaign_file import read_campaign
from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.cells_on_machine import on_this_machine
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.registry.prepare_model import Host
from tests.bench.paired import parser_of
from tests.bench.truth import found_in

CAMPAIGN = """
name = "{engines}-engines"
models = ["{model}"]
formats = ["{weight_format}"]
devices = ["cpu"]
backends = ["{backend}"]
budget_seconds = {seconds}

[server]
engines = {engines}
slots = {slots}
context_tokens = 1024

[workload]
preset = "sharegpt"
max_prompt_tokens = 512
max_output_tokens = 256

[slo]
name = "chat"
ttft_seconds = 2.0
tpot_seconds = 0.2
target = 0.90
"""


def measure(
    model: str, backend: str, weight_format: str, engines: int, seconds: float, out: Path
) -> str:
    """Run one campaign and return its row of the table."""
    text = CAMPAIGN.format(
        model=model,
        backend=backend,
        weight_format=weight_format,
        engines=engines,
        slots=16 // engines,
        seconds=seconds,
    )
    machine = Host()
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        file = Path(folder) / "campaign.toml"
        file.write_text(text, encoding="utf-8")
        plan = on_this_machine(read_campaign(file), machine, machine.facts(), progress)
        records = read_records(run(plan, out, progress))
    levels = levels_of(records)
    single = next(level for level in levels if level.is_single_stream)
    ttft, tpot = (single.quantile(column, 0.5) or 0.0 for column in (single.ttft, single.tpot))
    open_loop = [level for level in levels if level.rate is not None]
    shown_levels = "; ".join(
        f"{level.rate:.3g}/s, {judged.due}, {judged.share or 0:.0%}, "
        f"{level.output_tokens_per_second or 0:.0f} tokens/s"
        for level in open_loop
        for judged in (level.judge(plan.campaign.slo),)
    )
    words = capacity_text.capacity_in_words(found_in(records))
    return (
        f"| {model} {backend} {weight_format} | {engines} | {1000 * ttft:.0f} ms, "
        f"{1000 * tpot:.1f} ms | {shown_levels} | {words} |"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cells", nargs="+", metavar="MODEL:BACKEND:FORMAT")
    parser.add_argument("--seconds", type=float, default=100.0, help="budget of each campaign")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    options = parser.parse_args()
    rows = [
        "| | engines | single stream: TTFT, TPOT | levels: rate, requests, attainment | result |",
        "|---|---|---|---|---|",
    ]
    for cell in options.cells:
        model, backend, weight_format = cell.split(":")
        for engines in (1, 2):
            rows.append(
                measure(model, backend, weight_format, engines, options.seconds, options.out)
            )
            print(*rows, sep="\n", file=sys.stderr, flush=True)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
