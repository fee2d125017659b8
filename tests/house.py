"""The rules of the house, and its lines: `python -m tests.house`.

import-linter holds imports to the contracts of pyproject.toml: they run one way (models -> serving
-> loadtests -> reports), and neither modules nor packages beside each other import each other in a
circle. Exit status 1 where a contract is broken.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "serving", "loadtests", "reports")


def check_imports(root: Path = ROOT) -> tuple[bool, str]:
    """Return whether the packages under `root` keep the contracts, and what import-linter says."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program, "--no-cache", ROOT / "pyproject.toml"], cwd=root, capture_output=True, text=True
    )
    return done.returncode == 0, done.stdout + done.stderr


def lines_of(root: Path, package: str) -> int:
    """Lines of a package's Python, docstrings and comments included."""
    sources = (root / package).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)


def main() -> int:
    """Print what import-linter says where a contract is broken, and the lines; the exit status."""
    is_kept, text = check_imports()
    print("the contracts of imports are kept" if is_kept else text)
    counted = {package: lines_of(ROOT, package) for package in PACKAGES}
    counted["crossover"] = lines_of(ROOT, "crossover")  # its links are not followed
    for package, count in counted.items():
        print(f"{package:10} {count:6}")
    print(f"{'product':10} {sum(counted.values()):6}")
    print(f"{'tests':10} {lines_of(ROOT, 'tests'):6}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
