"""An engine of others in a campaign file: what is refused, what is filled in, who must say yes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtests.campaign.campaign_file import check_trust, parse_campaign
from loadtests.campaign.external_servers import Engine, argv, formats_of
from loadtests.cli.campaign_command import campaign
from loadtests.errors import BadCampaign
from loadtests.records.run_folder import RunFolder

FILE = """
name = "x"
models = ["135m"]
backends = []
workload = {{ prompt_tokens = 8, output_tokens = 4 }}
[[engines]]
name = "vllm"
command = '{command}'
{more}
"""
COMMAND = "vllm serve {model} --port {port}"


def text_of(command: str = COMMAND, more: str = "") -> str:
    return FILE.format(command=command, more=more)


def test_words_are_split_and_filled_without_a_shell() -> None:
    words = argv("serve '{model}' --port={port} --json '{\"a\": 1}' {other} $HOME; ls", {
        "model": "/a b/$(ls)", "port": 80
    })  # fmt: skip
    filled = ["serve", "/a b/$(ls)", "--port=80", "--json", '{"a": 1}', "{other}", "$HOME;", "ls"]
    assert words == filled


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("vllm serve {model}", "", r"engines\[0\].command: it has no \{port\}"),
        ("vllm serve {modle} {port}", "", r"\{modle\} is not one of \{model\}, \{port\}"),
        ('vllm "serve {port}', "", "cannot be split into words: no closing quotation"),
        ("", "", "it is empty"),
        ("vllm \u202e {port}", "", "characters that a terminal would not show"),
        (f"{COMMAND} --api-key abc", "", "api-key looks like a secret.*`variables`"),
        (f"{COMMAND} --hf-token=abc", "", "hf-token looks like a secret"),
        (f"{COMMAND} sk-0123456789", "", "a word of it looks like a secret"),
        (COMMAND, 'environment = { MY_TOKEN = "hf_0123456789" }', "MY_TOKEN looks like a secret"),
        (COMMAND, 'environment = { "A B" = "x" }', "'A B' = 'x' is no variable"),
        (COMMAND, 'variables = ["A=B"]', "'A=B' is no name of a variable"),
        (COMMAND, 'ready = "health"', "ready: it must be a path such as /health"),
        (COMMAND, 'format = "Q4_0"', "'Q4_0' is not one of bf16, fp16, fp32"),
        (COMMAND, 'names = { "135m" = "--x" }', "135m = '--x' is no model"),
        (
            COMMAND,
            'weights = "onnx"',
            r"engines\[0\].weights must be one of 'gguf', 'hf', 'none', got 'onnx'",
        ),
        (
            COMMAND,
            "wieghts = 1",
            r"\[0\].wieghts is no key; known here: name, command",
        ),
    ],
)
def test_what_cannot_be_is_refused(command: str, more: str, message: str) -> None:
    with pytest.raises(BadCampaign, match=message):
        parse_campaign(text_of(command, more))


@pytest.mark.parametrize("name", ["llama_cpp", "best", "a/b", "../x", ""])
def test_a_name_is_its_own_and_one_of_a_file(name: str) -> None:
    with pytest.raises(BadCampaign, match=r"is that of another engine|must be a file's name"):
        parse_campaign(text_of().replace('name = "vllm"', f'name = "{name}"'))


def test_cells_of_engines_stand_beside_ours() -> None:
    text = text_of(more='weights = "gguf"').replace("backends = []", 'formats = ["Q4_0", "bf16"]')
    plan = parse_campaign(text)
    assert [cell.key for cell in plan.cells] == [
        *("smollm2-135m-Q4_0-llama_cpp", "smollm2-135m-BF16-llama_cpp"),
        *("smollm2-135m-Q4_0-vllm", "smollm2-135m-BF16-vllm"),
    ]
    last = plan.cells[-1]
    assert (last.engine, last.synthetic, last.url, last.slots) == ("vllm", True, None, None)
    assert plan.campaign.engines["vllm"].command == COMMAND
    with pytest.raises(BadCampaign, match="engines are measured on models"):
        parse_campaign(text_of().replace('["135m"]', '[]\ncells = [{ model = "135m" }]'))


def test_formats_are_those_that_its_files_have() -> None:
    assert formats_of(Engine(name="a", command="", weights="gguf"), ["Q8_0", "int4"]) == ["Q8_0"]
    assert formats_of(Engine(name="a", command=""), ["Q8_0", "int8"]) == ["bf16"]
    assert formats_of(Engine(name="a", command="", weights="none"), ["Q8_0"]) == [""]
    assert formats_of(Engine(name="a", command="", weights="none", format="x"), []) == ["x"]


def test_a_command_runs_only_on_the_word_of_the_command_line() -> None:
    plan = parse_campaign(text_of(f'{COMMAND} "a b"', 'environment = { LD_PRELOAD = "/x y.so" }'))
    said = r"LD_PRELOAD='/x y.so' vllm serve '\{model\}' --port '\{port\}' 'a b'; .*--allow-comm"
    with pytest.raises(BadCampaign, match=said):
        check_trust(plan, ())
    check_trust(plan, (), allow_commands=True)
    needs = parse_campaign(text_of(more='variables = ["HF_TOKEN"]'))
    with pytest.raises(BadCampaign, match="'HF_TOKEN' is an environment variable that vllm sees"):
        check_trust(needs, (), allow_commands=True)
    check_trust(needs, ("HF_TOKEN",), allow_commands=True)


def test_a_dry_run_shows_it_whole_and_starts_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "started"
    file = tmp_path / "c.toml"
    file.write_text(text_of(f"touch {flag} {{model}} {{port}} {{slots}} {{kv_tokens}} {{threads}}"))
    out = str(tmp_path / "runs")
    asked = ["run", str(file), "--out", out]
    done = CliRunner().invoke(campaign, [*asked, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"runs, only with --allow-commands: touch {flag} " in done.output
    assert "smollm2-135m" in done.output and "'{port}' 16 32768 " in done.output
    refused = CliRunner().invoke(campaign, asked)
    assert isinstance(refused.exception, BadCampaign), refused.output
    assert not flag.exists() and not Path(out).exists()


def test_resume_and_repeat_ask_again(tmp_path: Path) -> None:
    """The command that would run is the one in the run folder, which may be a stranger's."""
    from loadtests.campaign.run_state import manifest_of
    from serving.hardware.machine_facts import hardware_facts

    plan = parse_campaign(text_of())
    folder = tmp_path / "run"
    RunFolder.create(folder, manifest_of(plan, "run", hardware_facts(), ())).close()
    done = CliRunner().invoke(campaign, ["resume", str(folder)])
    assert isinstance(done.exception, BadCampaign) and "--allow-commands" in str(done.exception)
