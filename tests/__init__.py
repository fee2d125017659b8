"""Tests of the product. Processes that they start know the backends of tests/fake_backend.py and
tests/scripted_backend.py."""

import os

os.environ.setdefault(
    "CROSSOVER_BACKENDS",
    "fake=tests.fake_backend:FakeBackend,scripted_text=tests.scripted_backend:ScriptedBackend,"
    "tool_calling=tests.scripted_backend:ToolCallingBackend",
)
