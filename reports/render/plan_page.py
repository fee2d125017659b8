"""The page of a plan: one offline HTML file with its sentences, its tables and its chart.

html = plan_page(plan)
"""

from __future__ import annotations

from markupsafe import Markup

from crossover.reports.chart_style import svg
from crossover.reports.plan.plan_costs import CostPlan
from crossover.reports.render.cold_start_text import cold_start_sentences, cold_start_table
from crossover.reports.render.html_page import render_template
from crossover.reports.render.mix_text import (
    alternatives_sentences,
    alternatives_table,
    mix_sentences,
    mix_table,
)
from crossover.reports.render.plan_chart import cost_chart
from crossover.reports.render.plan_text import (
    choice_sentence,
    comparison_table,
    explanations,
    options_table,
    sentences,
)

WIDTH = 440  # pixels of the chart, whose text can then be read on a phone


def plan_page(plan: CostPlan) -> str:
    return render_template(
        "plan.html",
        plan=plan,
        headline=choice_sentence(plan),
        options=options_table(plan),
        comparison=comparison_table(plan),
        mixes=mix_table(plan.mixes_to_show, plan.peak_rate),
        mix_sentences=list(mix_sentences(plan)),
        alternatives=alternatives_table(plan.mix_alternatives),
        alternatives_sentences=list(alternatives_sentences(plan.mix_alternatives)),
        cold_starts=cold_start_table(plan.cold_starts),
        cold_start_sentences=list(cold_start_sentences(plan.cold_starts, plan.peak_rate)),
        sentences=list(sentences(plan)),
        explanations=list(explanations(plan)),
        chart=Markup(svg(cost_chart(plan), WIDTH)),  # noqa: S704  # made by vl-convert
    )
