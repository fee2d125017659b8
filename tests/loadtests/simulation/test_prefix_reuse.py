"""How much of the shared prefixes a server found in its cache is read off its records."""

import msgspec
import numpy as np
import pytest

from loadtests.simulation.prefix_reuse import measured_reuse
from serving.workload.request_lengths import Workload
from tests.loadtests.simulation.known_server import STEP_TIMES, KnownServer

CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=128)


def test_how_much_a_server_found_in_its_cache_is_measured():
    shared = Workload(prompt_tokens=200, output_tokens=8, shared_prefix_tokens=150)
    server = KnownServer(STEP_TIMES.seconds)
    levels = [
        server.level([0.0, 5.0, 10.0], [200] * 3, [8] * 3, [0, 150, 150]),
        server.level([0.0], [200], [8], [150]),
    ]
    assert measured_reuse(shared, levels) == pytest.approx(0.75)
    assert measured_reuse(CHAT, levels) == 0.0
    untold = msgspec.structs.replace(levels[1], cached_tokens=np.array([np.nan]))
    assert measured_reuse(shared, [untold]) == 0.0
