"""Makes dashboards/crossover.json from panels.toml: python docker/grafana/make_dashboard.py"""

import json
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, COLUMNS = 8, 8, 3  # of Grafana's 24 columns
NO_QUERIES = {"title", "text", "unit", "when"}
SOURCE = {"type": "prometheus", "uid": "prometheus"}


def queries(panel: dict[str, str]) -> dict[str, str]:
    """Legend -> expression."""
    return {name: text for name, text in panel.items() if name not in NO_QUERIES}


def panels() -> list[dict[str, str]]:
    with open(HERE / "panels.toml", "rb") as file:
        return tomllib.load(file)["panel"]


def dashboard() -> str:
    """The dashboard as Grafana's JSON."""
    shown = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel["title"],
            "description": panel["text"],
            "datasource": SOURCE,
            "gridPos": {
                "h": HEIGHT,
                "w": WIDTH,
                "x": number % COLUMNS * WIDTH,
                "y": number // COLUMNS * HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
                for i, (legend, expr) in enumerate(queries(panel).items())
            ],
        }
        for number, panel in enumerate(panels())
    ]
    model = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(crossover_engine_slots, model_name)",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    page = {
        "uid": "crossover",
        "title": "Crossover",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [model]},
        "panels": shown,
    }
    return json.dumps(page, indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "dashboards" / "crossover.json").write_text(dashboard(), encoding="utf-8")
