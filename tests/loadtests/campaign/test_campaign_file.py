"""The campaign file: what it means, and that everything wrong with it is said with its place."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtests.analysis.slo import SLO_PRESETS
from loadtests.campaign.campaign_file import (
    DEMO,
    Campaign,
    CampaignFile,
    Cell,
    check_trust,
    parse_campaign,
    read_campaign,
    slo_of,
)
from loadtests.campaign.campaign_template import SECTIONS, keys_of, toml_value
from loadtests.errors import BadCampaign
from loadtests.workload.arrivals import Gamma


def test_the_product_of_models_formats_and_backends() -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m", "1b"]\nformats = ["Q4_0", "Q8_0"]\nbackends = ["llama_cpp"]'
    )
    assert [cell.key for cell in plan.cells] == [
        "smollm2-135m-Q4_0-llama_cpp",
        "smollm2-135m-Q8_0-llama_cpp",
        "llama-3.2-1b-Q4_0-llama_cpp",
        "llama-3.2-1b-Q8_0-llama_cpp",
    ]
    assert {
        (cell.slots, cell.context_tokens, cell.kv_dtype, cell.synthetic) for cell in plan.cells
    } == {(16, 2048, "auto", True)}


def test_each_backend_has_its_format_where_none_is_given() -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m"]\nbackends = ["llama_cpp", "torch", "onnx", "fake"]'
    )
    assert [cell.weight_format for cell in plan.cells] == ["Q4_0", "bf16", "int4", ""]
    assert len({cell.key for cell in plan.cells}) == 4


def test_hardware_budgets_multiply_and_cells_can_be_given_by_hand() -> None:
    plan = parse_campaign(
        """
        name = "x"
        models = ["135m"]
        hardware = [{ name = "one", cores = 1 }, { name = "all" }]
        cells = [{ model = "1b", format = "Q8_0" }]
        """
    )
    assert [cell.key for cell in plan.cells] == [
        "smollm2-135m-Q4_0-llama_cpp-one",
        "smollm2-135m-Q4_0-llama_cpp-all",
        "llama-3.2-1b-Q8_0-llama_cpp-one",
        "llama-3.2-1b-Q8_0-llama_cpp-all",
    ]
    assert [cell.hardware.cores for cell in plan.cells] == [1, None, 1, None]


def test_an_endpoint_that_is_there_already_is_one_cell() -> None:
    plan = parse_campaign(
        'name = "x"\n[target]\nurl = "http://10.0.0.7:8000/v1"\nmodel = "big"\napi_key_env = "KEY"'
    )
    (cell,) = plan.cells
    assert (cell.key, cell.model, cell.backend, cell.url) == (
        "big@10.0.0.7-8000-v1",
        "big",
        "external",
        "http://10.0.0.7:8000/v1",
    )
    assert plan.campaign.target is not None and plan.campaign.target.api_key_env == "KEY"


def test_a_campaign_is_data_until_the_command_line_says_more() -> None:
    """Its file may be a stranger's: no variable is sent, and no code runs, on its word alone."""
    target = parse_campaign('name = "x"\n[target]\nurl = "http://h:1"\napi_key_env = "HF_TOKEN"')
    said = "'HF_TOKEN' is an environment variable that http://h:1 is sent; .* --trust HF_TOKEN"
    for trusted in ((), ("OTHER",)):
        with pytest.raises(BadCampaign, match=said):
            check_trust(target, trusted)
    check_trust(target, ("OTHER", "HF_TOKEN"))
    code = parse_campaign('name = "x"\nmodels = ["135m"]\nbackends = ["a.b:C"]')
    with pytest.raises(BadCampaign, match="'a.b:C' runs as code; .* --trust a.b:C"):
        check_trust(code, ("a.b:D",))
    check_trust(code, ("a.b:C",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "no TOML"),
        ('models = ["135m"]', "^name is missing$"),
        ('name = "x"', "nothing to measure"),
        ('name = "x"\n[target]\nurl = "http://u:p@h"', r"target: the url holds a user"),
        (
            'name = "x"\n[target]\nurl = "http://h"\nextra_body = { password = "x" }',
            r"target: extra_body\['password'\] looks like a secret",
        ),
        (
            'name = "x"\nmodles = ["135m"]',
            "modles is no key; known here: name, models, formats",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[server]\nslotz = 1',
            "server.slotz is no key; known here: policy, slots",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[[hardware]]\ncpus = 1',
            r"hardware\[0\].cpus is no key; known here: name, cores",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[search]\nprecison = 0.1',
            "search.precison is no key; known here: method, starts",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[server]\nslots = "many"',
            "server.slots must be a whole number, got 'many'",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[server]\nslots = 0',
            "server.slots must be at least 1, got 0",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[server]\npolicy = "fast"',
            "server.policy must be one of 'auto', 'gpu-only', 'cpu-only', got 'fast'",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[workload]\npreset = "tea"',
            "workload: preset 'tea' is not one of chat",
        ),
        (
            'name = "x"\nmodels = ["135m"]\nslo = "quick"',
            "slo.preset must be one of chat, .* got 'quick'",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[slo]\npreset = "chat"\ntarget = 1.5',
            "slo.target must be below 1, got 1.5",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[slo]\nttft_seconds = -1',
            "slo.ttft_seconds must be above 0, got -1",
        ),
        (
            'name = "x"\nmodels = ["135m"]\narrivals = { kind = "gama" }',
            "arrivals.kind.*'gama'",
        ),
        (
            'name = "x"\nmodels = ["135m"]\nbudget_seconds = 0',
            "budget_seconds must be above 0, got 0",
        ),
        (
            'name = "x"\nmodels = ["99b"]',
            "'99b' is no rung of the ladder; there are smollm2-135m or 135m",
        ),
        (
            'name = "x"\nmodels = ["135m"]\nbackends = ["llama"]',
            "unknown backend 'llama'; known: llama_cpp",
        ),
        (
            'name = "x"\nmodels = ["135m"]\nbackends = ["vllm"]',
            r"other engines are \[\[engines\]\] tables",
        ),
        ('name = "x"\nmodels = ["135m"]\nformats = ["Q9"]', "no weight format 'Q9'; it has"),
        (
            'name = "x"\nmodels = ["135m", "smollm2-135m"]',
            "smollm2-135m-Q4_0-llama_cpp is there twice",
        ),
        (
            'name = "x"\nmodels = ["135m"]\nhardware = [{ cores = 1 }, { cores = 2 }]',
            "each of several hardware budgets needs a name of its own",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[target]\nurl = "http://x"',
            "goes without models, cells, engines",
        ),
        (
            'name = "x"\nmodels = ["135m"]\n[server]\ncontext_tokens = '
            "128\n[workload]\nprompt_tokens = 100\noutput_tokens = 100",
            "prompts of 100 and outputs of 100 tokens do not fit in server.context_tokens = 128",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(BadCampaign, match=message):
        parse_campaign(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadCampaign, match="nowhere.toml cannot be read"):
        read_campaign(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("name = 1")
    with pytest.raises(BadCampaign, match="bad.toml: name must be a text, got 1$"):
        read_campaign(tmp_path / "bad.toml")


def test_an_slo_by_name_with_changes_or_of_ones_own() -> None:
    assert slo_of("chat") == SLO_PRESETS["chat"]
    text = 'name = "x"\nmodels = ["135m"]\n[slo]\n'
    changed = parse_campaign(text + 'preset = "chat"\ntarget = 0.9').campaign.slo
    assert (changed.name, changed.ttft_seconds, changed.target) == ("chat", 2.0, 0.9)
    assert (
        parse_campaign(text + 'preset = "chat"\nttft_seconds = 1.0').campaign.slo.name
        == "chat (changed)"
    )
    own = parse_campaign(text + 'name = "mine"\ntpot_seconds = 0.05').campaign.slo
    assert (own.name, own.ttft_seconds, own.tpot_seconds, own.target) == ("mine", None, 0.05, 0.99)


def test_a_campaign_survives_the_manifest() -> None:
    """A run goes on with the campaign as its manifest keeps it, whatever became of the file."""
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m"]\narrivals = { kind = "gamma", cv = 3.0 '
        "}\n[server.options]\nflash = true"
    )
    again = msgspec.convert(msgspec.json.decode(msgspec.json.encode(plan.campaign)), Campaign)
    assert again == plan.campaign and again.arrivals == Gamma(cv=3.0)
    assert (
        msgspec.convert(msgspec.json.decode(msgspec.json.encode(plan.cells)), list[Cell])
        == plan.cells
    )


def test_the_demo_campaign_is_the_one_that_was_promised() -> None:
    plan = read_campaign(DEMO)
    slo = plan.campaign.slo
    assert (slo.name, slo.ttft_seconds, slo.tpot_seconds) == ("demo", 2.0, 0.2)
    assert plan.campaign.budget_seconds == 480 and plan.campaign.search.confirm == 2
    assert read_campaign(DEMO, budget_seconds=5.0).campaign.budget_seconds == 5.0


def test_the_gpus_demo_is_the_demo_on_a_gpu() -> None:
    there, here = read_campaign(DEMO.with_stem("demo-gpu")), read_campaign(DEMO)
    assert there.campaign.server.policy == "gpu-only"
    assert {cell.backend for cell in there.cells} == {"llama_cpp"}
    for same in ("slo", "workload", "budget_seconds"):
        assert getattr(there.campaign, same) == getattr(here.campaign, same)


def test_all_that_is_wrong_is_said_at_once() -> None:
    text = """
    name = 3
    budget_seconds = -1
    modles = []
    [server]
    slots = 0
    policy = "fast"
    [search]
    rates = [1, -2]
    """
    with pytest.raises(BadCampaign) as problem:
        parse_campaign(text)
    faults = str(problem.value).split("; ")
    assert [one.partition(" ")[0] for one in faults if not one.startswith("known here")] == [
        *("name", "budget_seconds", "modles", "server.policy", "server.slots", "search.rates[1]"),
    ] or len(faults) == 7
    both = 'name = "x"\nmodels = ["auto", "1b"]\nslo = "chat"\nslos = ["chat"]'
    with pytest.raises(BadCampaign, match="'auto' are rungs.*; slo and slos: give one"):
        parse_campaign(both)


def test_workloads_and_slos_are_axes() -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m", "360m"]\nslos = ["chat", { preset = "reading", target = 0.9 '
        "}]\n"
        "[workloads.short]\nprompt_tokens = 16\noutput_tokens = 8\n[workloads.long]\nprompt_tokens "
        "= 256\noutput_tokens = 8"
    )
    assert [cell.key for cell in plan.cells] == [
        f"smollm2-{size}-Q4_0-llama_cpp-{name}"
        for size in ("135m", "360m")
        for name in ("short", "long")
    ]
    assert [slo.name for slo in plan.campaign.all_slos] == ["chat", "reading"]
    assert plan.campaign.workload_of(plan.cells[1]).prompt_tokens == 256
    assert (
        msgspec.convert(msgspec.json.decode(msgspec.json.encode(plan.campaign)), Campaign)
        == plan.campaign
    )
    one = parse_campaign('name = "x"\nmodels = ["135m"]\nslo = "chat"').campaign
    assert one.slos == () and one.all_slos == (one.slo,), "a single SLO is kept as it always was"
    ends = parse_campaign(
        'name = "x"\n[target]\nurl = "http://h:1"\n[workloads.a]\npreset = '
        '"chat"\n[workloads.b]\npreset = "code"'
    )
    assert [cell.key for cell in ends.cells] == ["default@h-1-a", "default@h-1-b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('slo = "chat"\nslos = ["chat"]', "slo and slos: give one of them"),
        (
            'slos = ["chat", { preset = "chat", target = 0.5 }]',
            "slos has 'chat' twice: give each a name",
        ),
        (
            "[workload]\npreset = 'chat'\n[workloads.a]\npreset = 'code'",
            "workload and workloads: give one of them",
        ),
        ("[workloads.a]\npresent = 'code'", "workloads.a.present is no key; known here: preset"),
        ("hardware = [{ memory_gib = 0 }]", r"hardware\[0\].memory_gib must be above 0, got 0"),
        ("hardware = [{ threads = -1 }]", r"hardware\[0\].threads must be at least 1, got -1"),
        ("[load]\nworkers = 0", "load.workers must be at least 1, got 0"),
        ("search = { rates = [1.0, 0.0] }", r"search.rates\[1\] must be above 0, got 0.0"),
        (
            "[workloads.big]\nprompt_tokens = 3000\noutput_tokens = 8",
            r"big: prompts of 3000 and outputs of 8 tokens do not fit",
        ),
    ],
)
def test_axes_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadCampaign, match=message):
        parse_campaign('name = "x"\nmodels = ["135m"]\n' + text)


# Any file is a plan, or refused with a sentence.

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 4000),
    st.floats(),
    st.sampled_from(
        ["", "chat", "135m", "1b", "Q4_0", "fake", "llama_cpp", "poisson", "gamma", "x"]
    ),
    st.text(max_size=5),
)


def keyed(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = {key.name for kind, _ in SECTIONS.values() for key in keys_of(kind)}
    return st.dictionaries(st.sampled_from(sorted({*names, "kind", "unknown"})), values, max_size=4)


VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | keyed(inner), max_leaves=5
)


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items() if v is not None]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(one) for one in value if one is not None) + "]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"{value}"
    return toml_value(value)


@settings(max_examples=200, deadline=None)
@example(changes={"backends": []}, base="model")
@given(
    changes=st.dictionaries(st.sampled_from(CampaignFile.__struct_fields__), VALUES, max_size=4),
    base=st.sampled_from(["model", "target", "nothing"]),
)
def test_any_file_is_a_plan_or_is_refused(changes: dict[str, Any], base: str) -> None:
    starts: dict[str, dict[str, Any]] = {
        "model": {"name": "x", "models": ["135m"]},
        "target": {"name": "x", "target": {"url": "http://127.0.0.1:9"}},
        "nothing": {},
    }
    asked = starts[base] | changes
    text = "\n".join(f"{k} = {as_toml(v)}" for k, v in asked.items() if v is not None)
    check_parse(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab=[]{}\"'.,#\n 01-", max_size=40))
def test_any_text_is_a_plan_or_is_refused(text: str) -> None:
    check_parse(text)


def check_parse(text: str) -> None:
    try:
        plan = parse_campaign(text)
    except BadCampaign as problem:
        assert str(problem)
    else:
        assert plan.cells and len({cell.key for cell in plan.cells}) == len(plan.cells)
