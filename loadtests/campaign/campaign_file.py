"""The campaign file: what to measure, and how. TOML -> Campaign -> cells.

    name = "ladder"
    models = ["135m", "1b", "3b"]            # x formats x backends x hardware x workloads = cells
    formats = ["Q4_0"]
    budget_seconds = 600                     # of measuring, for all cells together

    [slo]
    preset = "chat"                          # or ttft_seconds and tpot_seconds
    target = 0.95

    [workload]
    preset = "chat"
    max_prompt_tokens = 512

All keys: campaign_keys.py and docs/campaign.md. An unknown key is refused with its path and the
known ones. Reading a campaign starts nothing and looks at no machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtests.campaign.campaign_keys import (
    AUTO,
    CampaignFile,
    Load,
    OnDisturbance,
    Server,
    SloSpec,
    check,
    explain,
)
from loadtests.campaign.cells import Cell, cells_of
from loadtests.capacity.search_config import SearchConfig
from loadtests.engines.command import Engine, commands_of
from loadtests.errors import BadCampaign, TargetUnusable
from loadtests.generator.endpoint import Target, check_target
from loadtests.generator.load_plan import DEFAULT_WORKLOAD
from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.requests import Workload
from models.errors import printable

DEMO = Path(__file__).parents[1] / "demo.toml"


class RepeatedLevel(msgspec.Struct, frozen=True, array_like=True):
    """A level of another run, to be measured again."""

    rate: float | None  # requests/s; None: single-stream requests
    seconds: float
    seed: int | None = None  # None: drawn anew


class Campaign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file with its defaults, as the manifest keeps it; `slo` and `workload` are the first."""

    name: str
    slo: Slo
    workload: Workload
    arrivals: Arrivals
    search: SearchConfig
    server: Server
    target: Target | None
    # Measuring time of all cells together; None: `search.budget_seconds` for each.
    budget_seconds: float | None
    seed: int
    sample_seconds: float
    disturbance: OnDisturbance = "wait"
    wait_seconds: float = 300.0
    load: Load = Load()
    slos: tuple[Slo, ...] = ()  # all of them where there are several
    workloads: dict[str, Workload] = {}  # by name where there are several
    engines: dict[str, Engine] = {}  # of others, by name
    repeats: str | None = None  # the run whose levels are measured again
    cell_levels: dict[str, tuple[RepeatedLevel, ...]] = {}  # of a repeat, by cell

    @property
    def all_slos(self) -> tuple[Slo, ...]:
        return self.slos or (self.slo,)

    def of(self, cell: Cell, slo: Slo | None = None) -> Campaign:
        """The campaign for one cell: its workload, its rates, the SLO that is searched for."""
        search = self.search
        if self.repeats is not None:
            loads = [
                (one.rate, one.seconds) for one in self._repeated(cell) if one.rate is not None
            ]
            search = msgspec.structs.replace(
                search,
                rates=tuple(rate for rate, _ in loads),
                rate_seconds=tuple(seconds for _, seconds in loads),
            )
        workload = self.workloads[cell.workload] if cell.workload else self.workload
        return msgspec.structs.replace(self, workload=workload, search=search, slo=slo or self.slo)

    def repeated_seed(self, cell: Cell, number: int) -> int | None:
        """The seed of the level that the cell's level `number` (1..) repeats; None: no repeat."""
        levels = self._repeated(cell)
        return levels[number - 1].seed if number <= len(levels) else None

    def _repeated(self, cell: Cell) -> list[RepeatedLevel]:
        """In the order a repeat measures them: the first single-stream level, then the rates."""
        levels = self.cell_levels.get(cell.key, ())
        alone = [one for one in levels if one.rate is None]
        return alone[:1] + [one for one in levels if one.rate is not None]


class Plan(msgspec.Struct, frozen=True):
    """A campaign, its cells in order, and the text they came from."""

    campaign: Campaign
    cells: list[Cell]  # none yet where the machine chooses the models (rungs.py)
    text: str

    @property
    def is_auto(self) -> bool:
        return not self.cells


def read_campaign(path: Path, *, budget_seconds: float | None = None) -> Plan:
    """The campaign in a TOML file; `budget_seconds` takes the place of the file's.

    Raises BadCampaign: file, path inside it, what is wrong.
    """
    try:
        text = path.read_text()
    except OSError as problem:
        raise BadCampaign(f"{path} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise BadCampaign(
            f"{path} is no text: {problem.reason} at byte {problem.start}"
        ) from problem
    try:
        return parse_campaign(text, budget_seconds=budget_seconds)
    except BadCampaign as problem:
        raise BadCampaign(f"{path}: {problem}") from problem


def parse_campaign(
    text: str, *, budget_seconds: float | None = None, models: Sequence[str] = ()
) -> Plan:
    """The campaign in a TOML text; `models` take the place of "auto". Raises BadCampaign."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise BadCampaign(f"no TOML: {problem}") from problem
    if budget_seconds is not None:
        raw["budget_seconds"] = budget_seconds
    try:
        file = msgspec.convert(raw, CampaignFile)
    except msgspec.ValidationError as problem:
        raise BadCampaign(explain(problem)) from problem
    check(file)
    if models and AUTO in file.models:
        file = msgspec.structs.replace(file, models=list(models))
    try:
        check_target(file.target or Target(url=""))
    except TargetUnusable as problem:
        raise BadCampaign(f"{problem} - at `$.target`") from problem
    slos = tuple(slo_of(spec) for spec in (file.slos or [file.slo or "chat"]))
    twice = next(
        (p.name for i, p in enumerate(slos) if p.name in [other.name for other in slos[:i]]), None
    )
    if twice is not None:
        raise BadCampaign(
            f"SLO {twice!r} is there twice: give each a name of its own - at `$.slos`"
        )
    campaign = Campaign(
        name=file.name,
        slo=slos[0],
        slos=slos if len(slos) > 1 else (),
        workload=next(iter(file.workloads.values()), file.workload or DEFAULT_WORKLOAD),
        workloads=file.workloads,
        arrivals=file.arrivals,
        search=file.search,
        server=file.server,
        target=file.target,
        budget_seconds=file.budget_seconds,
        seed=file.seed,
        sample_seconds=file.sample_seconds,
        disturbance=file.disturbance,
        wait_seconds=file.wait_seconds,
        load=file.load,
        engines={engine.name: engine for engine in file.engines},
    )
    return Plan(campaign, [] if AUTO in file.models else cells_of(file), text)


def check_trust(plan: Plan, trusted: Sequence[str], *, allow_commands: bool = False) -> None:
    """A campaign, or its run folder, may be a stranger's: the command line says what it may use.

    Raises BadCampaign where it names code (module:Class) or an environment variable that is not
    among `trusted`, and where it has commands without `allow_commands`.
    """
    target = plan.campaign.target
    named = {cell.backend: "runs as code" for cell in plan.cells if ":" in cell.backend}
    if target is not None and target.api_key_env is not None:
        named[target.api_key_env] = f"is an environment variable that {target.url} is sent"
    engines = plan.campaign.engines.values()
    for engine in engines:
        seen = f"is an environment variable that {engine.name} sees"
        named |= dict.fromkeys(engine.variables, seen)
    for name, what in named.items():
        if name not in trusted:
            raise BadCampaign(f"{name!r} {what}; if you trust the campaign, say so: --trust {name}")
    if engines and not allow_commands:
        commands = "; ".join(printable(one) for engine in engines for one in commands_of(engine))
        raise BadCampaign(
            f"the campaign runs commands: {commands}; "
            "if you trust each of them, say so: --allow-commands"
        )


def check_one_machine(plan: Plan) -> None:
    """Raises BadCampaign where a cell asks for a machine: there is this one alone."""
    for cell in plan.cells:
        if cell.hardware.accelerator is not None:
            raise BadCampaign(
                f"hardware {cell.hardware.name!r} asks for accelerator "
                f"{cell.hardware.accelerator!r}: only --on ray chooses among machines"
            )


def slo_of(spec: str | SloSpec) -> Slo:
    """The SLO of a preset, changed or not, or of own limits. Raises BadCampaign."""
    if isinstance(spec, str):
        spec = SloSpec(preset=spec)
    changes = {
        name: value
        for name in SloSpec.__struct_fields__
        if name != "preset" and (value := getattr(spec, name)) is not None
    }
    if spec.preset is not None and spec.preset not in SLO_PRESETS:
        raise BadCampaign(
            f"SLO {spec.preset!r} is not one of {', '.join(SLO_PRESETS)} - at `$.slo.preset`"
        )
    try:
        if spec.preset is None:
            return Slo(**{"ttft_seconds": None, "tpot_seconds": None, "name": "own", **changes})
        if changes.keys() & {"ttft_seconds", "tpot_seconds"}:
            changes.setdefault("name", f"{spec.preset} (changed)")
        return msgspec.structs.replace(SLO_PRESETS[spec.preset], **changes)
    except ValueError as problem:
        raise BadCampaign(f"{problem} - at `$.slo`") from problem
