"""Attacks on the commands: Locust's page, the current folder, run folders."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

from loadtests.errors import TargetUnusable
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.records.run_folder import REQUESTS
from tests.bench.attacks.edge import Attack, port_of
from tests.bench.attacks.engine import tiny
from tests.loadtests.load_generator.plain_locust import locust, swarm
from tests.models.test_isolated import OURS
from tests.serving.cli.test_serve import ROOT, run, server
from tests.serving.fakes import complete

LEVEL = "--workload 16x4 --rate 40 --duration 2 --out".split()


def locusts_page(folder: Path) -> tuple[str, bool]:
    """Forms that name a variable, a file to append to, another host; one of another site."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as trap:
        elsewhere = f"http://127.0.0.1:{trap.getsockname()[1]}"
        child = locust("--web-port", str(port), "--host", "http://127.0.0.1:9", folder=folder)
        page = connect(f"http://127.0.0.1:{port}")
        until = time.monotonic() + 60
        try:
            while True:
                try:
                    fetch(page, get_bytes(page, "/"), 5)
                    break
                except TargetUnusable:
                    assert time.monotonic() < until and child.poll() is None
                    time.sleep(0.1)
            form = f"user_count=1&spawn_rate=1&host={elsewhere}"
            codes = [
                swarm(page, f"{form}&api_key_env=HOME")[0],
                swarm(page, f"{form}&requests_file={folder / 'bashrc'}")[0],
                swarm(page, form, None, "Origin: http://evil.example")[0],
                swarm(page, form, "evil.example")[0],
            ]
            trap.settimeout(2.0)
            try:
                said = trap.accept()[0].recv(4096).decode()
            except TimeoutError:
                said = ""
        finally:
            page.close()
            child.terminate()
            child.communicate(timeout=20)
    left = "nothing sent" if not said else "sent"
    return f"{codes}, {left}", codes == [403] * 4 and not said and not list(folder.iterdir())


def current_folder(folder: Path) -> tuple[str, bool]:
    """`crossover serve ./tiny.gguf` in a folder with packages of our names."""
    tiny(folder)
    for name in OURS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()")
    script = (str(ROOT / "crossover.py"), "serve")
    with server(
        folder, "--policy", "cpu-only", model="./tiny.gguf", main=script, cwd=folder
    ) as one:
        status = complete(port_of(one.wait_ready()), max_tokens=2).status
    ran = (folder / "ran").exists()
    now = f"served ({status}), {'it ran' if ran else 'nothing of it ran'}"
    return now, status == 200 and not ran


def full_disk(folder: Path) -> tuple[str, bool]:
    """`crossover load` where files may have 20 kB, then a line that a killed writer left."""
    with server(folder) as one:
        url = one.wait_ready()["url"]
        command = [sys.executable, "-m", "crossover", "load", url, *LEVEL, str(folder / "runs")]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as level:
            resource.prlimit(level.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
            said = level.communicate(timeout=60)[1]
    (found,) = (folder / "runs").iterdir()
    with (found / REQUESTS).open("ab") as file:
        file.write(b'{"cell": "load", "lev')
    lines = (found / REQUESTS).read_bytes().count(b"\n")
    shown = run("-m", "crossover", "campaign", "show", str(found))
    named = "requests.jsonl" in said and "Traceback" not in said
    now = f"load ends with {level.returncode} and names the file; {lines} records kept"
    is_held = named and lines > 10 and shown.returncode == 0
    return f"{now}, show: {shown.returncode}", is_held


def secrets(folder: Path) -> tuple[str, bool]:
    """In a URL, in a body, in the variable of a key: where they are found afterwards."""
    runs, key = folder / "runs", ("--api-key-env", "OWN_API_KEY")
    with server(folder, *key, environment={"OWN_API_KEY": "hunter2"}) as one:
        about = one.wait_ready()
        url = about["url"]
        load = ("-m", "crossover", "load")
        told = url.replace("://", "://bob:hunter2@")
        refused = [
            run(*load, told, *LEVEL, str(runs)),
            run(*load, url, *LEVEL, str(runs), "--extra-body", '{"user": "sk-hunter2"}'),
        ]
        measured = run(*load, url, *LEVEL, str(runs), *key, OWN_API_KEY="hunter2")
        texts = [Path(f"/proc/{about['engine_pid']}/environ").read_bytes(), one.log.read_bytes()]
    assert measured.returncode == 0, measured.stderr
    (found,) = runs.iterdir()
    files = [path for path in found.rglob("*") if path.is_file()]
    texts += [path.read_bytes() for path in files]
    leaks = sum(b"hunter2" in text for text in texts)
    mode = os.stat(found).st_mode & 0o777
    codes = [one.returncode for one in refused]
    now = f"URL and body refused ({codes}); found in {leaks} of {len(texts)} places; {mode:o}"
    return now, codes == [2, 2] and not leaks and mode == 0o700


ATTACKS = (
    Attack("C1", "forms to Locust's page", "any variable, any file, a shell", locusts_page),
    Attack("H5", "packages of our names in the folder", "they ran", current_folder),
    Attack("M8", "a full disk, then a torn line", "the run is unreadable", full_disk),
    Attack("M9, L3", "a password, a key", "5 files at 0644, ps, /proc", secrets),
)
