"""Locust as people start it, from a folder that holds none of our packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import loadtests
from loadtests.errors import LoadError
from loadtests.load_generator.load_options import LoadOptions, plan_of_locust
from loadtests.workload.arrivals import Poisson, due_times
from serving.errors import ServingError

LOCUSTFILE = Path(loadtests.__file__).parent / "locustfile.py"


def test_headless_locust_sends_when_due_and_counts_each_request_once(
    truth_server: Callable[..., str], tmp_path: Path
) -> None:
    """Those on their way at the end of --run-time too; failures are failures."""
    url = truth_server(ttft=0.3, gap=0.01, fail="status:500", fail_every=4, case="by hand")
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", LOCUSTFILE, "--host", url, "--headless", "--json"]
        + "--rate 20 --run-time 2 --workload 16x4".split(),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(LOCUSTFILE.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr[-2000:]  # Locust's own, where requests failed
    (seen,) = json.loads(done.stdout)
    assert seen["name"] == "answer, from due to end"
    assert seen["num_requests"] == len(due_times(Poisson(), 20.0, 2.0, 1))
    assert 0 < seen["num_failures"] < seen["num_requests"] / 2
    assert 330 <= seen["max_response_time"] < 5000


def test_no_form_sends_a_key_elsewhere_and_values_are_checked() -> None:
    defaults = {name: getattr(LoadOptions(), name) for name in LoadOptions.__struct_fields__}
    own = {**defaults, "host": "http://a", "api_key_env": "KEY", "num_users": 3}
    assert plan_of_locust({**own, "model": ""}, own, 5.0).concurrency == 3
    plan = plan_of_locust({**own, "rate": "2.5", "seed": 7}, own, 5.0)
    assert (plan.rate, plan.seed, plan.window_seconds) == (2.5, 7, 5.0)
    for name, value in {"host": "http://b", "api_key_env": "HOME", "verify_tls": "false"}.items():
        with pytest.raises(LoadError, match=f"{name} can only be set on the command line"):
            plan_of_locust({**own, name: value}, own, 5.0)
    with pytest.raises(LoadError, match="--rate must be above 0, got '0'"):
        plan_of_locust({**own, "rate": "0"}, own, 5.0)
    with pytest.raises(ServingError, match="--rate must be finite"):
        plan_of_locust({**own, "rate": "inf"}, own, 5.0)
