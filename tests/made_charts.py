"""The charts of docs/accelerators.md, from a shipped run: `python -m tests.made_charts`.

They are the report's own figures: `crossover report RUN --format svg` draws the same of any run.
The run is, among those of several models, the one that read memory fastest as it began: others
disturbed it least.
"""

from __future__ import annotations

import re
from pathlib import Path

from reports.charts import style
from reports.charts.figure import Figure, vl_convert
from reports.charts.figures import figures
from reports.reference.archive import opened
from reports.run import numbers_of, read_records
from reports.write import Asked, read

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "reports" / "reference"
CHARTS = ROOT / "docs" / "charts"
# File -> how the slug of the run's figure begins.
SHOWN = {
    "roofline.svg": "roofline",
    "batch.svg": "batch-smollm2-360m",
    "memory.svg": "memory",
    "cost.svg": "cost-smollm2-360m",
}


def write_charts() -> None:
    archive = max(SHIPPED.glob("*.tar.xz"), key=_models_and_bandwidth)
    with opened(archive) as folder:
        found = read([folder], Asked(formats=()))
    made = figures(found.run, found.crossover)
    CHARTS.mkdir(exist_ok=True)
    for name, slug in SHOWN.items():
        svg = _svg(next(one for one in made if one.slug.startswith(slug)))
        (CHARTS / name).write_text(f"<!-- {archive.name} -->{svg}\n", encoding="utf-8")


def _models_and_bandwidth(archive: Path) -> tuple[bool, float]:
    with opened(archive) as folder:
        run = numbers_of(read_records(folder))
    is_of_several = len({cell.model for cell in run.cells}) > 1
    return is_of_several, float(run.facts["bandwidth_bytes_per_second"])


def _svg(figure: Figure) -> str:
    """Without the texts for each point that only a page reads out."""
    spec = figure.spec(640) | {"background": style.PAPER, "padding": 12}
    return re.sub(r' (?:aria-\w+|role)="[^"]*"', "", str(vl_convert().vegalite_to_svg(spec)))


if __name__ == "__main__":
    write_charts()
