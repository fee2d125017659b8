"""Every option and key has exactly one text, in the options.toml of its package."""

import re
from inspect import get_annotations
from typing import Any, get_args

import msgspec
import pytest

from crossover.loadtests.campaign.campaign_file import (
    CampaignFile,
    GpuSettings,
    Search,
    ServerSettings,
    SloSpec,
    ThirdPartyEngine,
)
from crossover.loadtests.cli.calibrate_command import CalibrateOptions
from crossover.loadtests.cli.compare_command import CompareOptions
from crossover.loadtests.cli.load_command import CommandOptions
from crossover.loadtests.load_generator.target import Target
from crossover.reports.cli.atlas_command import AtlasOptions
from crossover.reports.cli.plan_command import PlanOptions
from crossover.reports.cli.quick_command import QuickOptions
from crossover.reports.cli.report_command import ReportOptions
from crossover.reports.cli.size_command import SizeOptions
from crossover.reports.plan.plan_file import (
    ApiKeys,
    ColdStartKeys,
    ForecastKeys,
    MachineKeys,
    ModelKeys,
    PlanFile,
)
from crossover.serving.option_help import flags_of, texts_in, texts_of
from crossover.serving.server_options import ServeOptions
from crossover.serving.workload.arrivals import Arrivals
from crossover.serving.workload.request_lengths import Workload

COMMANDS: list[type[msgspec.Struct]] = [
    *(AtlasOptions, CalibrateOptions, CommandOptions, CompareOptions, PlanOptions),
    *(QuickOptions, ReportOptions, ServeOptions, SizeOptions),
]
TABLES: list[type[msgspec.Struct]] = [
    *(CampaignFile, GpuSettings, Search, ServerSettings, SloSpec, Target, ThirdPartyEngine),
    *(ApiKeys, ColdStartKeys, ForecastKeys, MachineKeys, ModelKeys, PlanFile, Workload),
    *get_args(Arrivals),
]
PLACEHOLDERS = {ThirdPartyEngine: ["{model}", "{port}"]}  # of a command, not lists


@pytest.mark.parametrize("kind", [*COMMANDS, *TABLES], ids=lambda kind: kind.__name__)
def test_every_field_has_a_text(kind: type[msgspec.Struct]) -> None:
    texts = texts_of(kind)
    assert texts.keys() == set(kind.__struct_fields__)
    for name, about in texts.items():
        assert about.text.endswith("."), name
        for placeholder in re.findall(r"\{\w+\}", about.text):
            assert placeholder in PLACEHOLDERS.get(kind, []), f"{name}: no list is {placeholder}"


@pytest.mark.parametrize("package", ["serving", "loadtests", "reports"])
def test_every_text_is_of_a_field(package: str) -> None:
    module = f"crossover.{package}"
    declared: set[tuple[str, Any]] = set()
    for kind in (*COMMANDS, *TABLES):
        for base in kind.__mro__:
            if base.__module__.startswith(f"{module}.") and "field_texts" not in vars(base):
                fields = {*get_annotations(base)} & {*kind.__struct_fields__}
                declared |= {(base.__name__, name) for name in fields}
    assert texts_in(module).keys() == declared


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_no_two_options_of_a_command_share_a_flag(kind: type[msgspec.Struct]) -> None:
    flags = list(flags_of(kind).values())
    assert len(set(flags)) == len(flags)


def test_a_field_that_is_declared_again_has_the_text_of_that_declaration() -> None:
    assert texts_of(ServerSettings)["context_tokens"] != texts_of(ServeOptions)["context_tokens"]
    assert texts_of(ServerSettings)["slots"] == texts_of(ServeOptions)["slots"]
