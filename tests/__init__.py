"""Tests of the product. Processes that they start know the backend of tests/fake_backend.py."""

import os

os.environ.setdefault("CROSSOVER_BACKENDS", "fake=tests.fake_backend:FakeBackend")
