"""`crossover serve` and `crossover doctor` as they are used: real processes, real ports, real
signals.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from crossover.loadtests.campaign.server_launch import info_of
from crossover.serving.backends.backend_table import BACKENDS
from crossover.serving.hardware.cpu_topology import SHARED_NICE
from tests.serving.fakes import Answer, ask, complete, scraped, wait_until

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]


class Server:
    """`crossover serve fake ...` with a free port and a ready file."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        model: str = "fake",
        port: str = "0",
        environment: Mapping[str, str] = MappingProxyType({}),
        main: tuple[str, ...] = ("-m", "crossover", "serve"),
        log: Path | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.ready_file = folder / "ready.json"
        self.log = log or folder / "log"
        environment = {
            **os.environ,
            "CROSSOVER_CACHE": str(folder / "cache"),
            "COLUMNS": "200",
            **environment,
        }
        named = [model] if model else []
        command = [
            *(sys.executable, *main),
            *named,
            "--port",
            port,
            "--ready-file",
            str(self.ready_file),
            *arguments,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def wait_ready(self, but_not: int | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                about: dict[str, Any] = json.loads(self.ready_file.read_text())
                if about["engine_pid"] != but_not:
                    return about
            time.sleep(0.02)
        raise AssertionError(f"not ready; status {self.process.poll()}: {self.log.read_text()}")

    def listening(self) -> str:
        return self.wait_for_output(r"listening on (\S+),")[1]

    def wait_for_output(self, pattern: str) -> re.Match[str]:
        """What of its log the pattern matches, once it does."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log.read_text())
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())

    def end(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


@contextlib.contextmanager
def server(folder: Path, *arguments: str, **options: Any) -> Iterator[Server]:
    one = Server(folder, *arguments, **options)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(10)
        assert one.process.stdout is not None
        one.process.stdout.close()


def completion(url: str, tokens: int = 5) -> Answer:
    return complete(port_of(url), model="fake", max_tokens=tokens, ignore_eos=True)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def get(url: str, path: str) -> Answer:
    return ask(port_of(url), "GET", path)


def is_running(url: str) -> bool:
    """True while a sequence is in the engine."""
    return scraped(get(url, "/metrics").body)["num_requests_running",] > 0


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_serves_logs_its_address_and_placement_and_drains(tmp_path: Path) -> None:
    with server(tmp_path, "--option", "step_seconds=0.02") as one, ThreadPoolExecutor() as threads:
        about = one.wait_ready()
        url = about["url"]
        assert (about["pid"], about["backend"]) == (one.process.pid, "fake/cpu")
        answer = completion(url)
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 5)
        assert answer.headers["x-crossover-backend"] == "fake/cpu"
        placed = get(url, "/v1/placement").json
        assert placed["state"] == "ready"
        assert placed["explanation"]["reasons"][0]["cause"] in ("no_device", "no_driver")
        log = one.log.read_text()
        assert "fake on the CPU" in log and "HTTP on " in log and "no_d" in log

        late = threads.submit(completion, url, 100)
        wait_until(lambda: is_running(url), 20)
        one.process.send_signal(signal.SIGTERM)
        one.wait_for_output("draining 1 request;")
        refused = completion(url)
        assert refused.status == 503 and "draining" in refused.body.decode()
        assert "retry-after" in refused.headers
        assert late.result(20).json["usage"]["completion_tokens"] == 100
        assert one.process.wait(20) == 0
        assert not one.ready_file.exists() and not Path(f"/proc/{about['engine_pid']}").exists()
        assert one.process.stdout is not None
        expected = rf"ready: {url} \(fake/cpu, loaded in [\d.]+ s\)\n"
        assert re.fullmatch(expected, one.process.stdout.read())


def chat(url: str, users: int, turns: int) -> list[tuple[str, int]]:
    """The answer of each turn and the tokens of its prompt that were computed, of users who take
    turns and whose prompts are token ids."""
    histories = [[user + 3] * 100 for user in range(users)]
    answers = []
    for turn in range(turns):
        for history in histories:
            body = {"prompt": history, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
            body["cache_salt"] = "of all users"
            answer = complete(port_of(url), model="fake", **body).json
            usage = answer["usage"]
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            answers.append((answer["choices"][0]["text"], computed))
            history += [100 + turn] * 20
    return answers


def test_a_prompt_cache_gives_what_a_slot_for_each_user_gives(tmp_path: Path) -> None:
    common = ("--context", "256", "--option", "token_bytes=65536")
    cached = ("--slots", "2", "--prompt-cache", "80MiB", "--require-cache-salt")
    folders = [tmp_path / "cached", tmp_path / "slots"]
    for folder in folders:
        folder.mkdir()
    with server(folders[0], *common, *cached) as one:
        url = one.wait_ready()["url"]
        with_cache = chat(url, users=5, turns=3)
        assert complete(port_of(url), model="fake", prompt=[3] * 100).status == 400  # no salt
        placed = get(url, "/v1/placement").json
        found = scraped(get(url, "/metrics").body)
        assert "prompt cache 80 MiB" in one.log.read_text()
    with server(folders[1], *common, "--slots", "5") as one:
        with_slots = chat(one.wait_ready()["url"], users=5, turns=3)
    assert with_cache == with_slots
    assert [computed for _, computed in with_cache] == [100] * 5 + [20] * 10
    assert placed["engine"]["stored_tokens"] == 1024  # 16 MiB of the 80 are for copies
    assert placed["memory"]["predicted"]["prompt_cache_bytes"] == 80 << 20
    assert placed["prompt_cache"]["sequences"] == 3
    assert 0 < found["prompt_cache_used_bytes",] < 64 << 20
    assert found["prompt_cache_restored_tokens_total",] > 0
    # The same settings, as a campaign records them and the simulation takes them.
    settings = info_of(placed).reported_settings
    assert (settings.slots, settings.stored_tokens) == (2, 1024)
    assert 0 < settings.copy_token_seconds < 0.01


def test_it_answers_503_with_the_reason_while_loading_and_ends_at_once_on_a_signal(
    tmp_path: Path,
) -> None:
    with server(tmp_path, "--option", "load_seconds=20") as one:
        url = one.listening()
        ready = get(url, "/ready")
        assert ready.status == 503 and "(loading): " in ready.error["message"]
        assert int(ready.headers["retry-after"]) >= 1
        assert completion(url).status == 503 and get(url, "/health").status == 200
        started = time.monotonic()
        assert one.end() == 0
        assert time.monotonic() - started < 15, "the load takes 20 s"


def test_a_second_signal_aborts_the_drain(tmp_path: Path) -> None:
    with server(tmp_path, "--option", "step_seconds=0.05") as one, ThreadPoolExecutor() as threads:
        url = one.wait_ready()["url"]
        threads.submit(completion, url, 1500)
        wait_until(lambda: is_running(url), 20)
        one.process.send_signal(signal.SIGINT)
        one.wait_for_output("draining 1 request;")
        assert one.process.poll() is None
        started = time.monotonic()
        assert one.end(signal.SIGINT) == 1
        assert time.monotonic() - started < 15, "its 1500 steps of 50 ms take 75 s"
        assert "aborting" in one.log.read_text() and "1 request aborted" in one.log.read_text()


def test_an_engine_that_is_killed_is_replaced_and_the_ready_file_follows(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        about = one.wait_ready()
        os.kill(about["engine_pid"], signal.SIGKILL)
        again = one.wait_ready(but_not=about["engine_pid"])
        assert again["url"] == about["url"] and completion(again["url"]).status == 200
        assert "died [engine_died]: killed by signal 9 (SIGKILL); unless" in one.log.read_text()
        assert one.end() == 0


@pytest.mark.parametrize(
    ("option", "tries", "expected"),
    [
        ("fail_cause=load_oom", 2, "load_oom"),
        ("steps_second=1", 1, "no option 'steps_second'. Options"),
    ],
)
def test_an_engine_that_cannot_load_ends_the_server_with_the_reason(
    tmp_path: Path, option: str, tries: int, expected: str
) -> None:
    with server(tmp_path, "--option", option) as one:
        assert one.process.wait(30) == 1
        log = one.log.read_text()
    assert log.count("died [") == tries and re.search(f"giving up: .*{expected}", log)
    assert not one.ready_file.exists()


def test_an_engine_inherits_no_secrets(tmp_path: Path) -> None:
    """Neither the server's key, whatever its variable is called, nor the hub's token."""
    secret = {"OF_ANY_NAME": "key-of-the-server", "HF_TOKEN": "token-of-the-hub"}
    with server(tmp_path, "--api-key-env", "OF_ANY_NAME", environment=secret) as one:
        engine = Path(f"/proc/{one.wait_ready()['engine_pid']}/environ").read_bytes()
        assert get(one.listening(), "/v1/models").status == 401
        assert b"CROSSOVER_ENGINE=" in engine and b"PYTHONSAFEPATH=1" in engine
        assert not [value for value in secret.values() if value.encode() in engine]


def test_cores_are_given_to_whom_they_belong(tmp_path: Path) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("one core only: there is nothing to divide")
    with server(tmp_path, "--cores", str(others[0]), "--api-cores", str(first)) as one:
        about = one.wait_ready()
        assert os.sched_getaffinity(about["engine_pid"]) == {others[0]}
        assert os.sched_getaffinity(about["pid"]) == {first}
        assert len({os.getpriority(os.PRIO_PROCESS, about[p]) for p in ("pid", "engine_pid")}) == 1


def test_an_engine_that_shares_its_cores_goes_behind_http(tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    with server(tmp_path, "--cores", core, "--api-cores", core) as one:
        about = one.wait_ready()
        engine = get(about["url"], "/v1/placement").json["engine"]
        assert (engine["cores"], engine["nice"]) == ([int(core)], SHARED_NICE)
        mine = os.getpriority(os.PRIO_PROCESS, about["pid"])
        for task in Path(f"/proc/{about['engine_pid']}/task").iterdir():
            assert os.getpriority(os.PRIO_PROCESS, int(task.name)) == mine + SHARED_NICE


def test_a_taken_port_is_one_sentence_and_no_model_is_made_for_it(
    tmp_path: Path, crossover: Run
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = crossover("serve", "135m", "--port", str(port), "--cache", str(tmp_path))
    assert done.returncode == 2 and done.stderr.strip() == (
        f"crossover: Cannot listen on 127.0.0.1:{port}: Address already in use. --port 0 takes a "
        "free port."
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no-such-model"),
        (["135m", "--policy", "gpu-only"], "no NVIDIA GPU"),
        (["135m", "--format", "Q9_9"], "Q9_9"),
        (["135m", "--backend", "vllm"], "vllm"),
        (["135m", "--kv-dtype", "fp7"], "fp7"),
        (["fake", "--option", "step_seconds"], "not of the form KEY=VALUE"),
        (["fake", "--cores", "4096"], "--cores names core 4096"),
        (["fake", "--engines", "4096"], "--engines 4096 needs a physical core for each engine"),
        (["fake", "--engines", "2", "--standby", "warm"], "--standby warm keeps a fallback loaded"),
        (["fake", "--cores", "x"], "--cores 'x' is not a list of cores"),
        (["fake", "--drain-timeout", "-1"], "--drain-timeout must be at least 0, got -1.0"),
        (["fake", "--memory-limit", "lots"], "--memory-limit 'lots' is not a size"),
        (["fake", "--prompt-cache", "lots"], "--prompt-cache 'lots' is not a size"),
        (["fake", "--api-key-env", "SURELY_NOT_SET"], "SURELY_NOT_SET"),
        (["fake", "--served-name", ""], "--served-name: "),
        (["135m", "--cache", __file__], "Not a directory. Choose another one with --cache"),
        (["fake", "--host", "203.0.113.7"], "Cannot listen on 203.0.113.7"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    tmp_path: Path, crossover: Run, arguments: list[str], message: str
) -> None:
    if "gpu-only" in arguments and Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    done = crossover("serve", *arguments, "--port", "0", CROSSOVER_CACHE=str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr


def test_the_help_page_teaches() -> None:
    done = run("-m", "crossover", "serve", "--help")
    assert done.returncode == 0 and "Examples:" in done.stdout and "--ready-file" in done.stdout


def test_help_is_quick_since_nothing_heavy_is_imported() -> None:
    heavy = {"torch", "numpy", "uvicorn", "starlette", "transformers", "llama_cpp"}
    heavy |= {
        "asyncio",
        "psutil",
        "crossover.serving.placement.placement_policy",
        "crossover.models.child_process",
    }
    code = (
        "import sys, crossover.serving.cli.serve_command; "
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert run("-c", code).stdout.strip() == "[]"


def test_doctor_looks_at_this_machine_and_makes_no_folder(tmp_path: Path) -> None:
    cache = str(tmp_path / "not-there-yet")
    done = run("-m", "crossover", "doctor", CROSSOVER_CACHE=cache)
    assert done.returncode == 0, done.stderr
    assert f"{os.cpu_count()} logical" in done.stdout and f" {cache} (" in done.stdout
    backends = re.findall(r"^  (\w+) +CPU (?:yes|no), GPU", done.stdout, re.MULTILINE)
    assert backends == [name for name, spec in BACKENDS.items() if spec.probe]
    assert not (tmp_path / "not-there-yet").exists()


def test_pages_of_other_origins_are_shut_out(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        port = port_of(one.wait_ready()["url"])
        for host, status in (("evil.example:80", 403), ("127.0.0.1", 200), ("[::1]:1", 200)):
            assert ask(port, "GET", "/v1/models", headers={"Host": host}).status == status
        headers = {"Origin": "https://evil.example", "Host": "localhost"}
        answer = ask(port, "OPTIONS", "/v1/completions", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
