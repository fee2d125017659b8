"""Normal traffic alone, then with attackers beside: `python -m tests.bench.soak`."""
