"""`python -m loadtests.driver ...` is `python -m locust ...`, half a second sooner: what a level starts as its load generator.

Most of the time that `import locust` takes is gevent asking, once for each module that it patches, which installed packages want to be
told: each time a walk through the metadata of everything that is installed. Here that walk is made once and its answer kept. Nothing else
differs; any locustfile and any option of Locust's works.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any


def main() -> None:
    asked = importlib.metadata.entry_points
    whole = asked()

    def kept(**which: Any) -> Any:
        return whole.select(**which) if which else whole

    importlib.metadata.entry_points = kept
    try:
        from locust.main import main as locust
    finally:
        importlib.metadata.entry_points = asked
    sys.argv[0] = "locust"
    sys.exit(locust())


if __name__ == "__main__":
    main()
