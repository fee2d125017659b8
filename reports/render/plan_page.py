"""The page of a plan: one offline HTML file with its sentences, its tables and its chart.

html = plan_page(plan)
"""

from __future__ import annotations

from importlib import resources

import jinja2
from markupsafe import Markup

from crossover.reports.chart_style import dark_rules, svg
from crossover.reports.plan.plan_costs import Plan
from crossover.reports.render.cold_start_text import cold_start_sentences, cold_start_table
from crossover.reports.render.plan_chart import cost_chart
from crossover.reports.render.plan_text import (
    choice_sentence,
    comparison_table,
    explanations,
    options_table,
    sentences,
)

WIDTH = 400  # pixels of the chart, whose text can then be read on a phone

_ASSETS = resources.files("crossover.reports").joinpath("render", "assets")


def plan_page(plan: Plan) -> str:
    """Return the whole page as HTML."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_ASSETS.joinpath("plan.html").read_text("utf-8"))
    css = _ASSETS.joinpath("report.css").read_text("utf-8") + dark_rules()
    tables = {
        "Options": options_table(plan),
        "Beside the API and over years": comparison_table(plan),
        "If machines stop": cold_start_table(plan.cold_starts) if plan.cold_starts else None,
    }
    return template.render(
        plan=plan,
        headline=choice_sentence(plan),
        tables={title: table for title, table in tables.items() if table is not None},
        sentences=[*sentences(plan), *cold_start_sentences(plan.cold_starts)],
        explanations=list(explanations(plan)),
        chart=Markup(svg(cost_chart(plan), WIDTH)),  # noqa: S704  # made by vl-convert
        css=Markup(css),  # noqa: S704  # our own file
    )
