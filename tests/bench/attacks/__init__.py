"""Attacks at full size against real servers: `python -m tests.bench.attacks [WORD...]`."""
