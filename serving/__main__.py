"""`python -m serving MODEL ...` is `crossover serve MODEL ...`."""

from __future__ import annotations

import sys

from models.errors import ModelError, printable
from serving.cli.serve_command import serve
from serving.errors import ServingError


def main() -> None:
    """Run `serve`; errors raised on purpose are one sentence on standard error and status 2."""
    try:
        serve(prog_name="python -m serving")
    except (ServingError, ModelError) as problem:
        print(f"crossover: {printable(str(problem))}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
