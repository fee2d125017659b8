"""The dashboard, the rules and the manifests against a real server, and a real Prometheus where one
is installed.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
sys.path.append(str(DOCKER / "grafana"))
from make_dashboard import dashboard, panels, queries  # type: ignore[import-not-found]  # noqa: E402

REFUSED = b'{"model": "fake", "prompt": "x", "temperature": -1}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a server with the fake backend, that has answered, refused and failed."""
    folder = tmp_path_factory.mktemp("monitored")
    ready = folder / "ready.json"
    command = [
        sys.executable,
        "-m",
        "crossover",
        "serve",
        "fake",
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield urllib.parse.urlsplit(json.loads(ready.read_text())["url"]).netloc
    finally:
        process.terminate()
        process.wait(30)


def ask(server: str, body: bytes) -> None:
    request = urllib.request.Request(
        f"http://{server}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=30).read()
    except urllib.error.HTTPError as problem:
        problem.close()


def load(server: str) -> None:
    ask(server, json.dumps({"model": "fake", "prompt": "a b c", "max_tokens": 8}).encode())
    ask(server, REFUSED)


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of all panels, rules and alerts."""
    found = [(f"panel {p['title']}", text) for p in panels() for text in queries(p).values()]
    groups = yaml.safe_load((DOCKER / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        found.append((f"rule {rule.get('alert') or rule['record']}", rule["expr"]))
    return found


def test_the_dashboard_is_made_of_its_panels() -> None:
    made = (DOCKER / "grafana" / "dashboards" / "crossover.json").read_text()
    assert made == dashboard(), "run: python docker/grafana/make_dashboard.py"
    targets = [t["expr"] for panel in json.loads(made)["panels"] for t in panel["targets"]]
    assert len(targets) == len(set(targets)) > 20


def test_panels_and_rules_use_only_metrics_that_a_server_exposes(server: str) -> None:
    load(server)
    with urllib.request.urlopen(f"http://{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    exposed = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    buckets = set(re.findall(r'first_token_seconds_bucket\{le="([^"]+)"', text))
    assert "2.5" in buckets
    recorded = set(re.findall(r"record: (\S+)", (DOCKER / "prometheus" / "rules.yml").read_text()))
    for where, expr in expressions():
        used_metrics = set(re.findall(r"crossover[_:][\w:]+", re.sub(r'"[^"]*"', "", expr)))
        for name in used_metrics - recorded:
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            assert {name, family, name.removesuffix("_total")} & exposed, (where, name)


def test_manifests_name_the_same_app_port_and_probes() -> None:
    folder = DOCKER / "k8s"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    kinds = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == kinds
    found = {name: yaml.safe_load((folder / name).read_text()) for name in listed}
    container = found["deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    named = {port["name"] for port in container["ports"]}
    assert {found["service.yaml"]["spec"]["ports"][0]["targetPort"]} == named
    assert found["hpa.yaml"]["spec"]["scaleTargetRef"]["name"] == "crossover"


@pytest.fixture(scope="module")
def prometheus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Prometheus that scrapes the server under the files' own configuration."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on this machine (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server]
    config["rule_files"] = [str(DOCKER / "prometheus" / "rules.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/d"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def series(prometheus: str, expr: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expr})
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=10) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []
    return [one for one in found if one["value"][1] != "NaN"]


def test_no_panel_is_empty_under_load(server: str, prometheus: str) -> None:
    """Queries of the dashboard and the rule have series in a real Prometheus of a real server."""
    wanted = {
        text: panel["title"]
        for panel in panels()
        if panel.get("when") not in ("a GPU", "an alert")
        for text in queries(panel).values()
    }
    wanted |= dict.fromkeys(('up{job="crossover"} == 1', "crossover:bad_share:rate5m"), "rule")
    deadline = time.monotonic() + 60
    while wanted and time.monotonic() < deadline:
        load(server)
        time.sleep(0.5)
        wanted = {
            text: title
            for text, title in wanted.items()
            if not series(prometheus, text.replace("$model", ".+"))
        }
    assert not wanted


def test_alerts_fire_when_they_should() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on this machine (Debian: apt-get install prometheus)")
    folder = DOCKER / "prometheus"
    for arguments in (["check", "rules", "rules.yml"], ["test", "rules", "rules.test.yml"]):
        done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
