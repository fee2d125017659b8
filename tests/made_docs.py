"""The parts of docs/ that are made from the code: `python -m tests.made_docs` writes them.

The map has the first sentence of each file; the plans are what `crossover plan` says. The lists of
options.toml are made too, so that a help page needs no import of the tables that it lists.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

from crossover.models import formatting
from crossover.models.identity.model_ladder import PUBLISHED
from crossover.models.shape.model_families import FAMILIES
from crossover.models.weights.weight_formats import GgufTensorLayout
from crossover.reports.answers.check_conditions import QUANTITIES
from crossover.reports.cli.report_command import DEFAULT_FORMATS, FORMATS
from crossover.reports.devices.calibrated_machines import read_machines
from crossover.reports.plan.plan_costs import CostPlan, make_plan
from crossover.reports.plan.plan_file import BadPlan
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
from crossover.reports.plan.sizing import DEFAULT_DEVICES, size
from crossover.reports.plan.tasks import TASKS, task_named
from crossover.reports.render.plan_text import as_text, sentences
from crossover.reports.render.size_text import as_text as as_sizing_text
from crossover.reports.sections.all_sections import SECTIONS
from crossover.serving.backends.backend_table import BACKENDS
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.slo import LIMITS_HELP, SLO_PRESETS
from crossover.serving.option_help import texts_in
from crossover.serving.toml_files import read_toml
from crossover.serving.workload.request_lengths import PRESETS, SESSION_PRESETS
from tests.campaign_template import campaign_template
from tests.docs_of_structs import campaign_keys, plan_keys
from tests.house import PACKAGES

ROOT = Path(__file__).parent.parent
SUFFIXES = (".py", ".js", ".html", ".toml", ".css", ".svg")
DOCTYPE = re.compile(r"<!DOCTYPE html>\s*", re.IGNORECASE)
COMMENT_START = re.compile(r"(?://|#|/\*|<!--|\{#)\s*")
COMMENT_END = re.compile(r"\s*(?:\*/|-->|-?#\}).*$")
NAME_WIDTH = 26  # columns of the map for a file's name and the space after it
TEXT_WIDTH = 100  # columns of the map for what the file has


def first_comment(text: str) -> str:
    """The first paragraph of the comment at the start of a file that is not Python; "": none."""
    lines = []
    for line in DOCTYPE.sub("", text, count=1).splitlines():
        start = COMMENT_START.match(line)
        content = line[start.end() :] if start else ""
        if not content:
            break
        lines.append(COMMENT_END.sub("", content))
        if lines[-1] != content:
            break
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring or of a file's comment, and of the lines after it
    what completes its last sentence, without the full stop."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = first_comment(text)
    line, _, following = text.partition("\n\n")[0].partition("\n")
    if following and not line.endswith((".", ":")):
        end = re.search(r"[.:](?=\s|$)", following)
        line += " " + (following[: end.end()] if end else following)
    return " ".join(line.split()).rstrip(".:")


def entry(name: str, text: str) -> list[str]:
    """The lines of one file in the map. A text that is too long for one line is wrapped."""
    first, *more = textwrap.wrap(text, TEXT_WIDTH)
    start = f"  {name:{NAME_WIDTH - 1}} "
    return [start + first, *(" " * (NAME_WIDTH + 2) + line for line in more)]


def tree() -> list[str]:
    """The map: a heading for each folder, an entry for each module."""
    out = ["```", "crossover/"]
    for path in sorted((ROOT / "crossover").glob("*.py")):
        out += entry(path.name, first_sentence(path))
    for package in PACKAGES:
        folder = ""
        for path in sorted((ROOT / package).rglob("*"), key=lambda p: (p.parent, p)):
            text = first_sentence(path) if path.suffix in SUFFIXES else ""
            if not text:
                continue
            here = str(path.parent.relative_to(ROOT)) + "/"
            if here != folder:
                out += ["", here]
                folder = here
            out += entry(path.name, text)
    return [*out, "```"]


def quantities() -> list[str]:
    """What a condition of `report --check` may ask for."""
    rows = [f"| `{name}` | {quantity.description} |" for name, quantity in QUANTITIES.items()]
    return ["| quantity | what it is |", "|---|---|", *rows]


def topics() -> list[str]:
    """The topics of the report's page, one for each file that has some of them."""
    files = dict.fromkeys(Path(inspect.getfile(make)) for make in SECTIONS)
    lines = []
    for path in files:
        lines += wrapped(f"- {first_sentence(path)}.")
    return lines


@cache
def example_plan(name: str) -> CostPlan:
    """The plan of a file of docs/plan-examples."""
    return plan_with(name)


def plan_with(name: str, **keys: object) -> CostPlan:
    """The plan of a file of docs/plan-examples, with other `keys`."""
    folder = ROOT / "docs" / "plan-examples"
    tables = read_toml(folder / f"{name}.toml", BadPlan)[0] | keys
    question = question_of_tables(tables, folder)
    return make_plan(question, candidates_of(question))


def plan_output(name: str, **keys: object) -> str:
    """What `crossover plan` says to a file of docs/plan-examples, with other `keys`."""
    plan = plan_with(name, **keys) if keys else example_plan(name)
    plan_text = as_text(plan, 110)
    return "\n".join(line.rstrip() for line in plan_text.splitlines())


def in_a_block(name: str, **keys: str) -> list[str]:
    """The output of a plan as a block of Markdown."""
    return ["```", *plan_output(name, **keys).splitlines(), "```"]


def first_part(name: str, **keys: str) -> list[str]:
    """The output of a plan up to the explanations, as a block of Markdown."""
    sentence, table, *_ = plan_output(name, **keys).split("\n\n")
    return ["```", *sentence.splitlines(), "", *table.splitlines(), "```"]


def mix_output() -> list[str]:
    """The choice and the tables of docs/plan-examples/mix.toml, as a block of Markdown."""
    parts = plan_output("mix").split("\n\n")[:4]
    return ["```", *"\n\n".join(parts).splitlines(), "```"]


def buy_or_rent_line() -> list[str]:
    """What the plan of docs/plan-examples/buy.toml says of buying and renting, as a block of
    Markdown."""
    starts = ("Buying costs", "Renting costs")
    (line,) = [text for text in sentences(example_plan("buy")) if text.startswith(starts)]
    return ["```", *textwrap.wrap(line, TEXT_WIDTH), "```"]


def sizing_output() -> list[str]:
    """What `crossover size` says of 50 users who chat with an 8B model, as a block of Markdown."""
    text = as_sizing_text(size(task_named("chat"), 50, ["8b"], []), 100)
    return ["```", *(line.rstrip() for line in text.splitlines()), "```"]


def tasks() -> list[str]:
    """The tasks of `crossover size`."""
    lines = [
        "| task | tokens in, out (mean) | thinks for | first token within | then a token within |",
        "|---|---|---|---|---|",
    ]
    for task in TASKS.values():
        lengths = Demand(task.workload).lengths()
        tokens = f"{lengths.prompt.mean():,.0f}, {lengths.output.mean():,.0f}"
        limits = [
            formatting.limit(limit)
            for limit in (task.slo.ttft_seconds, task.slo.tpot_seconds)
            if limit is not None
        ]
        think = f"{task.mean_think_seconds:.0f} s"
        cells = [f"`{task.name}`", tokens, think, limits[0], limits[1]]
        lines.append(f"| {' | '.join(cells)} |")
    items: list[str] = []
    for task in TASKS.values():
        target = formatting.share(task.slo.target)
        text = f"- `{task.name}`: users who {task.does}. {task.source} SLO `{task.slo.name}`: "
        text += f"{task.slo.source}, for {target} of requests."
        items += wrapped(text)
    return [*lines, "", *items]


def wrapped(text: str) -> list[str]:
    """An item of a list, in lines of 100 columns."""
    return textwrap.wrap(text, TEXT_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def cold_start_output() -> list[str]:
    """The cold starts of docs/plan-examples/cold-start.toml with the run of docs/results/demo, as a
    block of Markdown."""
    run = str(ROOT / "docs" / "results" / "demo")
    text = plan_output("cold-start", model="360m", machines=[{"run": run}])
    _, _, cold_starts, *_ = text.split("\n\n")
    return ["```", *cold_starts.splitlines(), "```"]


def families() -> list[str]:
    """The families of dense models that onnx and torch compute."""
    *names, last = sorted(f"`{name}`" for name in FAMILIES)
    return [
        f"`onnx` and `torch` compute {', '.join(names)} and {last}",
        "(`model_type` of config.json).",
    ]


def shapes() -> list[str]:
    """The models of the ladder that only llama.cpp serves, with the size of their files."""
    lines = []
    for model in PUBLISHED:
        if model.shape is None:
            continue
        weight_format, spec = model.shape.formats[0], model.spec
        shape = model.shape.in_format(weight_format)
        file_bytes = sum(
            GgufTensorLayout(name, None, sizes, shape.tensor_type(name, sizes)).bytes
            for name, sizes in shape.tensors().items()
        )
        kind = "a mixture of experts" if spec.experts is not None else "dense"
        if spec.is_recurrent:
            kind += ", with recurrent layers between those with attention"
        if spec.window_tokens is not None:
            kind += ", with sliding windows"
        size = f"{file_bytes / 1e9:.0f} GB in {weight_format}"
        lines.append(f"- `{spec.name}`, {size}: {kind}.")
    return lines


def lists(**members: Iterable[str]) -> list[str]:
    """The table of an options.toml whose names the texts have in braces."""
    return ["[lists]", *(f'{name} = "{", ".join(names)}"' for name, names in members.items())]


def shipped_backends() -> list[str]:
    """The backends of the table, without those of CROSSOVER_BACKENDS."""
    return [name for name in BACKENDS if BACKENDS[name].cls.startswith("crossover.")]


def atlas_files() -> list[str]:
    """The rows of the machines in docs/atlas: what was measured, when, and by which version."""
    rows = ["| file | machine | day | Crossover | models |", "|---|---|---|---|---|"]
    for machine in read_machines([ROOT / "docs" / "atlas"]):
        models = ", ".join(
            f"{steps.model.name} {steps.weight_format} ({steps.backend})"
            for steps in machine.models
        )
        link = f"[{machine.path.stem}](atlas/{machine.path.name})"
        facts = machine.file.measured_on, machine.file.crossover
        rows.append(" | ".join(("| " + link, machine.name, *facts, models + " |")))
    return rows


# file -> (name of the marks, what stands between them), ...
MADE: dict[str, dict[str, Callable[[], list[str]]]] = {
    "serving/options.toml": {
        "lists": lambda: lists(
            backends=shipped_backends(), traces=PRESETS, distributions=SESSION_PRESETS
        )
    },
    "loadtests/options.toml": {
        "lists": lambda: lists(
            backends=shipped_backends(),
            presets=[*PRESETS, *SESSION_PRESETS],
            sessions=[name for name, preset in SESSION_PRESETS.items() if preset.turns.mean > 1],
            slos=SLO_PRESETS,
            limits=[LIMITS_HELP],
        )
    },
    "reports/options.toml": {
        "lists": lambda: lists(
            slos=SLO_PRESETS,
            limits=[LIMITS_HELP],
            traces=PRESETS,
            tasks=TASKS,
            size_devices=DEFAULT_DEVICES,
            quantities=QUANTITIES,
            formats=FORMATS,
            default_formats=[DEFAULT_FORMATS],
        )
    },
    "README.md": {"buy": buy_or_rent_line},
    "docs/map.md": {"map": tree},
    "docs/campaign.md": {"keys": campaign_keys},
    "docs/plan.md": {
        "buy": partial(in_a_block, "buy"),
        "mlperf": partial(in_a_block, "mlperf-8b"),
        "mlperf-fp8": partial(first_part, "mlperf-8b", gpu_format="fp8"),
        "cold-start": cold_start_output,
        "mix": mix_output,
        "keys": plan_keys,
    },
    "docs/size.md": {"chat": sizing_output, "tasks": tasks},
    "docs/atlas.md": {"atlas": atlas_files},
    "docs/models.md": {"families": families, "shapes": shapes},
    "docs/report.md": {"topics": topics, "quantities": quantities},
}
# Files that are made as a whole.
WHOLE: dict[str, Callable[[], str]] = {
    "loadtests/campaign.toml": campaign_template,
    "docs/plan-examples/office-hours.txt": lambda: (
        "$ crossover plan docs/plan-examples/office-hours.toml\n"
        + plan_output("office-hours")
        + "\n"
    ),
}


def replaced(name: str, mark: str, text: str) -> str:
    """A document with one of its made parts as it must be.

    Raises ValueError where the marks are missing.
    """
    opening, closing = ("# ", "") if name.endswith(".toml") else ("<!-- ", " -->")
    start = f"{opening}{mark}: made by python -m tests.made_docs{closing}"
    end = f"{opening}end of {mark}{closing}"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{name} lacks the line {start!r} or {end!r}")
    return before + start + "\n" + "\n".join(MADE[name][mark]()) + "\n" + end + after


if __name__ == "__main__":
    for name in MADE:
        text = (ROOT / name).read_text(encoding="utf-8")
        for mark in MADE[name]:
            text = replaced(name, mark, text)
        (ROOT / name).write_text(text, encoding="utf-8")
        texts_in.cache_clear()  # documents are made of the texts in options.toml
    for name, make in WHOLE.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
