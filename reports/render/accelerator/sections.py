"""The page's second half, in order: what an accelerator does differently, told from the run."""

from __future__ import annotations

from reports.accelerator.batching import batching_of
from reports.accelerator.costs import comparisons_of
from reports.accelerator.formats import formats_of
from reports.accelerator.joules import energies_of
from reports.accelerator.loading import loadings_of
from reports.accelerator.phases import phases_of
from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.render.accelerator.compared import formats_section
from reports.render.accelerator.loads import fallback_section, loading_section
from reports.render.accelerator.memory import memory_section
from reports.render.accelerator.money import cost_section, energy_section
from reports.render.accelerator.section import Section
from reports.render.accelerator.speed import batching_section, host_section, phases_section


def sections_of(run: RunNumbers, found: Crossover) -> list[Section]:
    """Every section, also those of which nothing was measured: they say so."""
    return [
        phases_section(phases_of(run)),
        batching_section(batching_of(run), run),
        host_section(run),
        loading_section(loadings_of(run)),
        memory_section(run),
        formats_section(formats_of(run)),
        energy_section(energies_of(run), run),
        cost_section(comparisons_of(run, found.capacities)),
        fallback_section(run),
    ]
