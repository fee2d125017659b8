"""The table of attacks: what each did before, what it does now, whether it is held.

    python -m tests.bench.attacks              # all
    python -m tests.bench.attacks M3 JSON      # those whose line has one of these words

Exit status 1 where one is not held.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.bench.attacks import commands, edge, engine

ATTACKS = (*edge.ATTACKS, *engine.ATTACKS, *commands.ATTACKS)


def main() -> int:
    words = sys.argv[1:]
    failed = 0
    print("| item | attack | before | now | held |\n|---|---|---|---|---|")
    for attack in ATTACKS:
        if words and not any(word in f"{attack.item} {attack.what}" for word in words):
            continue
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            try:
                now, is_held = attack.run(Path(folder))
            except Exception as problem:  # the table goes on
                now, is_held = f"{type(problem).__name__}: {problem}"[:120], False
        failed += not is_held
        row = (attack.item, attack.what, attack.before, now, "yes" if is_held else "NO")
        print(f"| {' | '.join(row)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
