"""`python -m locust`, half a second sooner: what a level starts as its load generator.

While Locust is imported, gevent asks once per patched module which installed packages want to be
told, each time by walking through all package metadata. Here that walk is made once.
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
