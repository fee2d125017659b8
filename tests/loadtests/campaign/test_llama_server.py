"""A real engine of others: llama.cpp's llama-server, where tests/bench/llama_server/build.sh has
built it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.campaign.campaign_file import parse_campaign
from loadtests.campaign.cell_selection import layout_of
from loadtests.campaign.server_launch import Command
from loadtests.load_generator.openai_endpoint import probe
from models.cache import cache_dir
from models.random_weights import write_gguf
from serving.hardware.machine_facts import allowed_cores
from tests.shapes import TINY_LLAMA

CAMPAIGN = """
name = "x"
models = ["{model}"]
backends = []
[[engines]]
name = "llama-server"
command = '''
  {program} -m {{model}} --host {{host}} --port {{port}} --no-webui --metrics
  -np {{slots}} -c {{kv_tokens}} -t {{threads}}
'''
weights = "gguf"
format = "F16"
[server]
slots = 2
context_tokens = 128
[workload]
prompt_tokens = 8
output_tokens = 4
"""


def test_it_is_started_asked_and_ended(tmp_path: Path) -> None:
    program = next((cache_dir(None) / "peers").glob("llama-server-*/bin/llama-server"), None)
    if program is None:
        pytest.skip("llama-server is not built: tests/bench/llama_server/build.sh")
    model = tmp_path / "tiny.gguf"
    write_gguf(TINY_LLAMA, model, "F16", seed=3)
    plan = parse_campaign(CAMPAIGN.format(model=model, program=program))
    (cell,) = plan.cells
    layout = layout_of(cell, allowed_cores())
    assert layout is not None and (cell.slots, cell.context_tokens) == (2, None)
    server = Command(cell, plan.campaign, layout, tmp_path)
    try:
        server.wait_ready(lambda what, fraction: None)
        ready = server.ready(cell.key)
        assert ready.info.details is not None and ready.info.details["version"], "by /props"
        assert f"-m {model}" in ready.info.details["command"]
        facts = probe(server.target)
        assert facts.tokenizer == "llama.cpp" and facts.usage and facts.ignore_eos
    finally:
        server.stop()
    assert server.trouble() is not None and not server.engine_pids()
