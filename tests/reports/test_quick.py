"""`crossover quick`: a server whose step times are known, on a simulated clock; and the command."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.campaign.quick_campaign import (
    QuickQuestion,
    fitting_workload,
    quick_plan,
)
from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.find_servers import (
    find_local_servers,
    ports_that_need_a_key,
)
from crossover.loadtests.load_generator.target import Target
from crossover.models.identity.model_ladder import ladder_model
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.answers.quick_answer import QuickAnswer, quick_answer
from crossover.reports.cli import quick_command
from crossover.reports.render.quick_text import lines_of, markdown_of
from crossover.reports.report_data import read_report
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel
from crossover.serving.capacity.slo import SLO_PRESETS, Slo, parse_slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.campaign.simulated import Simulated, rate_units_in
from tests.loadtests.capacity.known_server import SETTINGS
from tests.loadtests.load_generator.scripted_endpoint import (
    ReceivedRequest,
    answered,
    scripted,
    sse,
)

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

CHAT = SLO_PRESETS["chat"]
TARGET = Target(url="http://127.0.0.1:1", model="llama3.2:1b")
SHORT = Workload(preset="chat", max_prompt_tokens=256, max_output_tokens=64)


def answer_of(
    simulated: Simulated, out: Path, slo: Slo = CHAT, shape: str | None = "1b"
) -> QuickAnswer:
    question = QuickQuestion(target=TARGET, slo=slo, workload=SHORT)
    data = read_report(simulated.run(quick_plan(question), out))
    spec = None if shape is None else ladder_model(shape).spec
    cells = tuple(msgspec.structs.replace(cell, spec=spec) for cell in data.cells)
    data = msgspec.structs.replace(data, cells=cells)
    return quick_answer(data, software="Ollama", think_seconds=45.0)


def test_a_running_server_is_estimated_within_ninety_seconds(tmp_path: Path) -> None:
    simulated = Simulated(base=0.02, row=0.005, prompt=0.001, policy=None)
    answer = answer_of(simulated, tmp_path)
    assert simulated.now < 75  # the rest is for starting and simulating
    known = StepTimeModel(base_seconds=0.02, row_seconds=0.005, prompt_token_seconds=0.001)
    truth = ServerModel(known, SETTINGS).capacity(Demand(SHORT), CHAT, 2000).rate
    found = answer.capacity
    assert found is not None and found.estimated_rate is not None
    assert found.estimated_rate == pytest.approx(truth, rel=0.25)
    assert found.low is not None and found.high is not None
    assert found.low < truth < found.high
    assert answer.grade == "estimated" and found.confirmed_rate is None
    assert answer.slots == 8
    users = answer.users
    assert users is not None and users.answer_seconds > 0
    assert users.estimate == pytest.approx(found.estimated_rate * (45 + users.answer_seconds))
    assert answer.binding is not None and answer.binding.lifted_rate is not None
    assert answer.takeover.name is not None and answer.takeover.dollars_per_hour is not None
    text, block = "\n".join(lines_of(answer)), markdown_of(answer)
    assert len(rate_units_in(simulated.output.getvalue() + text)) == 1
    single = answer.single_request
    assert single is not None and single.measured_ratio == pytest.approx(1.0, abs=0.1)
    assert f"at the longest of {single.longest_prompt_tokens}; TPOT" in text
    for words in ("Single request", "Estimated capacity", "Concurrent users", " binds: ", "GPU"):
        assert words in text and words in block
    assert msgspec.json.decode(msgspec.json.encode(answer), type=QuickAnswer) == answer


@pytest.mark.parametrize("share", [0.25, pytest.param(0.5, marks=pytest.mark.slow)])
def test_beside_another_process_the_idle_machine_is_estimated_in_the_same_time(
    share: float, tmp_path: Path
) -> None:
    """What the process took is left out of the step times, and the screen says which machine the
    estimate is of, and the capacity of the other."""
    quiet = Simulated(base=0.02, row=0.005, prompt=0.001, policy=None)
    alone = answer_of(quiet, tmp_path / "alone").capacity
    busy = Simulated(
        base=0.02, row=0.005, prompt=0.001, policy=None, hog=(0.0, 1e9), hog_share=share
    )
    answer = answer_of(busy, tmp_path / "beside")
    found = answer.capacity
    assert busy.now < 90 and alone is not None and found is not None
    assert found.estimated_rate == pytest.approx(alone.estimated_rate, rel=0.15)
    assert found.low and found.high and alone.estimated_rate
    assert found.low < alone.estimated_rate < found.high
    known = StepTimeModel(base_seconds=0.02, row_seconds=0.005, prompt_token_seconds=0.001)
    as_busy = ServerModel(known.slower(1 / (1 - share)), SETTINGS)
    busy_truth = as_busy.capacity(Demand(SHORT), CHAT, 2000).rate
    assert found.busy_rate == pytest.approx(busy_truth, rel=0.25, abs=0.05)
    assert answer.binding is None or answer.binding.kind != "other_processes"
    (note,) = [note for note in answer.notes if "of this machine alone" in note]
    assert f"other processes took {share:.0%}" in note and note in "\n".join(lines_of(answer))
    assert note.endswith(
        "The largest share in the most disturbed measurement went to `hog` (pid 7)."
    )


def test_limits_of_the_whole_answer_are_estimated_too(tmp_path: Path) -> None:
    known = StepTimeModel(base_seconds=0.02, row_seconds=0.005, prompt_token_seconds=0.001)
    slo = parse_slo("ttft=2,e2e=4,target=0.9")
    answer = answer_of(Simulated(base=0.02, row=0.005, prompt=0.001, policy=None), tmp_path, slo)
    truth, without = (
        ServerModel(known, SETTINGS).capacity(Demand(SHORT), limits, 2000).rate
        for limits in (slo, parse_slo("ttft=2,target=0.9"))
    )
    found = answer.capacity
    assert found is not None and found.estimated_rate == pytest.approx(truth, rel=0.25)
    assert found.estimated_rate < 0.8 * without, "the limit of the whole answer binds"
    assert "whole answer within" in "\n".join(lines_of(answer))
    assert answer.binding is not None and answer.binding.missed_limit == "e2e"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("refused", "the server answered at most 5 and refused others"),
        ("http_500", "the server dropped requests"),
    ],
)
def test_requests_that_failed_in_bursts_are_named(error: str, words: str, tmp_path: Path) -> None:
    simulated = Simulated(base=0.02, row=0.005, prompt=0.001, policy=None)
    whole = answer_of(simulated, tmp_path)
    assert "bursts failed" not in "".join(whole.notes)
    file = Path(whole.run) / "requests.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    bursts = [one for one in records if "#burst." in one["level"]]
    last = [one for one in bursts if one["level"] == bursts[-1]["level"]]
    for one in last[:3]:
        one |= {"error": error, "status": 429, "content_seconds": []}
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    answer = quick_answer(read_report(Path(whole.run)), software="Ollama", think_seconds=45.0)
    assert f"3 of {len(bursts)} requests of the bursts failed (3 {error})" in answer.notes[0]
    assert words in answer.notes[0]


@pytest.mark.parametrize(
    ("simulated", "reason", "limit"),
    [
        (Simulated(prompt=0.1, policy=None), "missed the SLO", "misses the TTFT limit"),
        (Simulated(chunk=4, policy=None), "steps are unknown", None),
    ],
)
def test_an_answer_without_a_capacity_gives_the_reason(
    simulated: Simulated, reason: str, limit: str | None, tmp_path: Path
) -> None:
    answer = answer_of(simulated, tmp_path, shape=None)
    assert answer.grade == "not measured" and answer.users is None
    assert reason in answer.reason
    assert answer.ttft_seconds is not None
    text = "\n".join(lines_of(answer))
    assert f"none: {answer.reason}" in text and "--shape" in text
    assert ("Single requests would meet the SLO with slo.ttft_seconds = " in text) is bool(limit)
    assert (limit or "not known") in text


def test_an_answer_without_a_capacity_says_what_would_give_one(tmp_path: Path) -> None:
    """On the terminal, in JSON and on the page of the run."""
    answer = answer_of(Simulated(prompt=0.012, policy=None), tmp_path)
    assert answer.capacity is not None and answer.capacity.is_none
    advice = answer.capacity.advice
    assert "There would be a capacity with slo." in advice and "prompts half as long" in advice
    assert advice in "\n".join(lines_of(answer)) and advice in msgspec.json.encode(answer).decode()
    data = read_report(Path(answer.run))
    (line,) = (
        line for line in first_screen_of(data, answers_of(data)).lines if "No capacity of" in line
    )
    assert advice in line


def test_requests_are_cut_to_the_context_of_the_server() -> None:
    whole = Workload(preset="chat", max_prompt_tokens=1024, max_output_tokens=256)
    assert fitting_workload(whole, None) == whole == fitting_workload(whole, 2048)
    cut = fitting_workload(whole, 512)
    assert cut.max_prompt_tokens is not None and cut.max_output_tokens is not None
    assert cut.max_prompt_tokens + cut.max_output_tokens < 512
    with pytest.raises(LoadError, match="too short"):
        fitting_workload(whole, 64)


def run_command(*words: str) -> tuple[int, str]:
    """`crossover quick`: its exit status, and what it said or why it refused."""
    result = CliRunner().invoke(cli.app, ["quick", *words])
    problem = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.output + problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "chatt"], "chatt"),
        (["--slo", "batch"], "no latency limit"),
        (["--workload", "conversation"], "crossover campaign run FILE"),
        (["--seconds", "5"], "at least 30"),
        (["--shape", "nonsense"], "--shape"),
        (["--workload", "chat:x"], "--workload"),
        (["ftp://host"], "not the URL of an endpoint"),
        (["http://user:secret@host"], "password"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = run_command(*words)
    assert status != 0 and message in text
    assert not list(tmp_path.iterdir())


def test_without_a_server_it_offers_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_command, "find_local_servers", list)
    monkeypatch.setattr(quick_command, "ports_that_need_a_key", list)
    status, text = run_command()
    assert status != 0 and "8000" in text and "11434" in text
    assert "crossover serve" in text
    monkeypatch.setattr(quick_command, "ports_that_need_a_key", lambda: [8080])
    status, text = run_command()
    assert status != 0 and "crossover quick 8080 --api-key-env" in text


def test_beside_the_server_that_is_measured_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(request: ReceivedRequest) -> bytes:
        if request.path == "/v1/models":
            return answered({"data": [{"id": "m"}]})
        return answered({"error": "no such thing"}, 404)

    with (
        scripted(refuses) as first,
        scripted(refuses) as second,
        scripted(lambda request: answered({"error": "Unauthorized"}, 401)) as locked,
    ):
        ports = tuple(int(url.rpartition(":")[2]) for url in (first, second, locked))
        found, refused = find_local_servers(ports), ports_that_need_a_key(ports)
        monkeypatch.setattr(quick_command, "find_local_servers", lambda: found)
        monkeypatch.setattr(quick_command, "ports_that_need_a_key", lambda: refused)
        status, text = run_command("--out", str(tmp_path))
    assert status != 0 and f"there is also an OpenAI-compatible server at {second}" in text
    assert (
        f"port {ports[2]} answers only with an API key; `crossover quick {ports[2]} --api" in text
    )


def test_a_server_that_does_not_stream_is_named_with_its_words(tmp_path: Path) -> None:
    with scripted(lambda request: answered({"error": {"message": "no such thing"}}, 404)) as url:
        status, text = run_command(url, "--model", "m", "--out", str(tmp_path))
    assert status != 0 and "no such thing" in text


def test_a_server_that_is_too_slow_is_refused_within_the_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_command, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(quick_command, "CLOSING_SECONDS", 0.0)

    test_is_over = threading.Event()

    def never(request: ReceivedRequest) -> bytes:
        if request.path.endswith("completions"):
            test_is_over.wait()
        return answered({"data": [{"id": "m"}]})

    with scripted(never) as url:
        status, text = run_command(url, "--seconds", "1", "--out", str(tmp_path))
        test_is_over.set()
    assert status != 0 and "too slow" in text and "--seconds 4" in text
    assert "Traceback" not in text
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # no alarm is left behind


def test_a_server_that_fails_is_refused_and_not_called_slow(tmp_path: Path) -> None:
    chunks = [{"choices": [{"index": 0, "text": "a"}]}] * 8
    requests = 0

    def fails(request: ReceivedRequest) -> bytes:
        nonlocal requests
        if not request.path.endswith("completions"):
            return answered({"data": [{"id": "m"}]})
        requests += 1
        whole = sse(*(b"data: " + json.dumps(chunk).encode() for chunk in chunks), b"data: [DONE]")
        # Four: of two probes.
        return whole if requests <= 4 else answered({"error": {"message": "out of memory"}}, 500)

    with scripted(fails) as url:
        status, text = run_command(url, "--seconds", "30", "--out", str(tmp_path))
    assert status != 0 and "single requests failed" in text and "http_500" in text
    assert "TTFT limit" not in text


def test_an_slo_of_own_limits_is_the_campaigns() -> None:
    slo = parse_slo("ttft=3,tpot=0.05,target=0.9")
    plan = quick_plan(QuickQuestion(target=TARGET, slo=slo))
    assert plan.campaign.slo == slo
    assert plan.campaign.search.confirm == 0 and plan.campaign.target == TARGET
    assert json.dumps("llama3.2:1b") in plan.text
