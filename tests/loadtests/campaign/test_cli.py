"""`crossover campaign`: what it says before anything is started."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from loadtests.cli.campaign_command import campaign


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'name = "x"\nmodels = ["135m", "70b"]\nbudget_seconds = 90\nhardware = [{ memory_gib = 4.0 '
        '}]\n[workload]\npreset = "chat"\nscale = 0.1\nmax_output_tokens = 64'
    )
    out = str(tmp_path / "runs")
    done = CliRunner().invoke(campaign, ["run", str(file), "--dry-run", "--out", out])
    assert done.exit_code == 0, done.output
    for part in (
        "for 99 % of requests",
        "smollm2-135m-Q4_0-llama_cpp: at most 1 min 30 s; cores: engine",
        "skipped, needs",
        "workload: chat lengths x 0.1, answers of at most 64 tokens",
        "the budget is 4 GiB",
        "1 min 30 s of measuring",
    ):
        assert part in done.output, part
    assert not (tmp_path / "runs").exists()
