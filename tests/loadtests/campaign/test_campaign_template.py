"""The campaign file that is printed parses, holds every key, and has the defaults as values."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec
import pytest
from typer.testing import CliRunner

from loadtests.campaign.campaign_file import CampaignFile, Server, SloSpec, parse_campaign
from loadtests.campaign.campaign_template import SECTIONS, STARTED, campaign_template, keys_of
from loadtests.cli.campaign_command import campaign
from loadtests.workload.arrivals import Arrivals
from tests.docs_of_structs import toml_type

MINIMAL = f"""
name = "{STARTED["name"]}"
models = ["smollm2-135m"]
budget_seconds = 600
workload = {{ preset = "chat", max_prompt_tokens = 512, max_output_tokens = 256 }}
"""


def test_it_parses_and_says_nothing_but_the_defaults() -> None:
    done = CliRunner().invoke(campaign, ["init"])
    assert done.exit_code == 0 and done.output == campaign_template()
    written, minimal = parse_campaign(done.output), parse_campaign(MINIMAL)
    assert written.campaign == minimal.campaign and written.cells == minimal.cells


def test_it_holds_every_key_of_every_table() -> None:
    top, *tables = re.split(r"^(?:# )?\[+(\w+)\]+", campaign_template(), flags=re.M)
    texts = dict(zip(tables[::2], tables[1::2], strict=True)) | {"": top}
    skipped = {*SECTIONS, "arrivals", "workloads"}
    expected = {name: kind for name, (kind, _) in SECTIONS.items()} | {"": CampaignFile}
    for name, kind in expected.items():
        found = re.findall(r"^(?:# )?(\w+) =", texts[name], re.M)
        known = [one for one in kind.__struct_fields__ if name or one not in skipped]
        assert found == known, name
    assert set(texts) == {*expected, "arrivals"}
    tags = [str(kind.__struct_config__.tag) for kind in get_args(Arrivals)]
    assert all(tag in texts["arrivals"] for tag in tags)


def test_a_key_is_read_with_its_type_default_and_comment() -> None:
    keys = {key.name: key for key in keys_of(Server)}
    slots = keys["slots"]
    assert (slots.type, slots.default) == (int, 16)
    assert slots.what == "sequences that run at the same time"
    assert keys["kv_tokens"].default is None and not keys["kv_tokens"].is_required
    assert all(key.what for key in keys.values())
    assert [key.name for key in keys_of(CampaignFile) if key.is_required] == ["name"]
    assert all(issubclass(kind, msgspec.Struct) for kind, _ in SECTIONS.values())


def test_every_key_has_a_comment() -> None:
    kinds = [CampaignFile, *(kind for kind, _ in SECTIONS.values()), *get_args(Arrivals)]
    silent = [
        f"{kind.__name__}.{key.name}" for kind in kinds for key in keys_of(kind) if not key.what
    ]
    assert not silent
    wrong = [line for line in campaign_template().splitlines() if "  # of " in line]
    assert not wrong


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (list[str | SloSpec], "array of string or table"),
        (Literal["a", "b"], '`"a"` or `"b"`'),
        (tuple[float, ...], "array of number"),
        (str | SloSpec | None, "string or table"),
        (dict[str, Any], "table"),
    ],
)
def test_types_are_those_of_toml(annotation: Any, said: str) -> None:
    assert toml_type(annotation) == said
