"""The verb `quick`: how much can this server serve? Options in, an answer of one screen out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import typer

from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.quick_campaign import (
    DEFAULT_SECONDS,
    MIN_SECONDS,
    QuickQuestion,
    fitting_workload,
    quick_plan,
)
from crossover.loadtests.errors import EndpointRefuses, Incomplete, LoadError, TargetUnusable
from crossover.loadtests.host.child_processes import ignore_signals, signals_interrupt
from crossover.loadtests.host.cpu_time_taken import CoreWatch
from crossover.loadtests.host.listening_process import listening_pid
from crossover.loadtests.host.resource_sampler import family
from crossover.loadtests.levels.disturbance import (
    CPU_QUOTA,
    HYPERVISOR,
    disturbance_in_words,
    disturbance_of,
)
from crossover.loadtests.load_generator.endpoint_access import (
    Access,
    public_command,
    variables_of,
    with_references,
)
from crossover.loadtests.load_generator.endpoint_details import ask_details
from crossover.loadtests.load_generator.find_servers import (
    SOFTWARE_NAMES,
    USUAL_PORTS,
    LocalServer,
    find_local_servers,
    look_at,
    ports_that_need_a_key,
)
from crossover.loadtests.load_generator.load_options import parse_slo_option, parse_workload
from crossover.loadtests.load_generator.openai_endpoint import probe_endpoint
from crossover.loadtests.load_generator.target import Target, check_target
from crossover.loadtests.records.journal_events import Disturbance
from crossover.models.errors import ModelError
from crossover.models.identity.identify_model import identify, short_model_id
from crossover.models.identity.model_ladder import PACKAGED, packaged_file
from crossover.models.shape.model_spec import ModelSpec
from crossover.reports.answers.quick_answer import QuickAnswer, failed_requests, quick_answer
from crossover.reports.render.quick_text import lines_of, markdown_of
from crossover.reports.report_data import ReportData, read_report
from crossover.serving.capacity.binding_limit import REMEDIES
from crossover.serving.capacity.slo import LIMITED_TIMES, Slo
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import Positive, Seconds

CLOSING_SECONDS = 3.0  # of the maximum time, to end what runs when the time is over
READY_SECONDS = 20.0  # that a server may need for its first answer
MORE_TIME = 4  # times the seconds that were too few
MAX_FAILED_SHARE = 0.5  # of the single requests; more say nothing of the latency
THINK_SECONDS = 45.0  # mean of inference-perf's interactive-chat


class QuickOptions(Access, frozen=True, kw_only=True):
    """The command line of `crossover quick`."""

    url: str | None = None
    model: str | None = None
    slo: str = "chat"
    workload: str = "chat:1024:256"
    think: Seconds = THINK_SECONDS
    shape: str | None = None
    api: Literal["auto", "completions", "chat"] = "auto"
    seconds: Positive = DEFAULT_SECONDS
    out: Path = Path("runs")
    as_json: bool = False


def _quick(options: QuickOptions) -> None:
    """Estimate in 90 seconds how many requests per second and users a running server can serve.

    Sends single requests, then two short bursts, fits the time of an engine step to them, and
    simulates the highest rate that meets the latency target. The answer is an estimate with its
    90 % confidence interval; the last lines say how to confirm it. The server should be otherwise
    idle, and should get no other requests meanwhile.

    \b
    crossover quick                                  # the server that runs on this machine
    crossover quick http://10.0.0.5:8000 --slo interactive
    crossover quick 8080 --workload 2000x200 --slo ttft=5,tpot=0.2
    crossover quick --json > quick.json
    """
    options, url = with_references(options, options.url)
    options = msgspec.structs.replace(options, url=url)
    slo = _slo_of(options)
    if options.seconds < MIN_SECONDS:
        raise LoadError(
            f"--seconds must be at least {MIN_SECONDS:g}, got {options.seconds:g}: fewer tell "
            "nothing of a server."
        )
    shape, workload = _shape_of(options), parse_workload(options.workload)
    if workload.has_sessions:
        raise LoadError(
            f"--workload {options.workload!r} has conversations: what a server saves of their "
            "histories shows after several turns, and this estimate has no time for them. "
            "`crossover campaign run FILE` measures them, with the workload and a [target] in "
            "FILE; here, give lengths of single requests, such as chat:1024:256."
        )
    watch = _ServerWatch()
    try:
        with _time_limit(options.seconds, watch), signals_interrupt(), _QuickProgress() as progress:
            server = _server_of(options, progress)
            watch.begin(server.url)
            question = QuickQuestion(
                target=_target_of(options, server, progress),
                slo=slo,
                workload=workload,
                seconds=options.seconds,
            )
            answer = _measured(options, question, server, shape, progress)
    except _TimeIsOver as problem:
        raise Incomplete(str(problem)) from None
    except KeyboardInterrupt:
        raise Incomplete("Stopped.") from None
    if options.as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
        return
    for line in _screen(answer, needs_trust=bool(variables_of(options) or options.client_cert)):
        typer.echo(line)


quick = command_of(QuickOptions, _quick)


class _TimeIsOver(LoadError):
    """The maximum time has passed before the server was measured."""


class _ServerWatch:
    """Watches the cores of a server of this machine, to see whether other processes took CPU time
    from it."""

    def __init__(self) -> None:
        self._cores: CoreWatch | None = None  # None: the server is on another machine

    def begin(self, url: str) -> None:
        """Begin with the server of this URL."""
        if (pid := listening_pid(url)) is not None:
            self._cores = CoreWatch(lambda: family(pid), os.getpid())
            self._cores.read()

    def disturbance(self) -> Disturbance | None:
        """Return what was taken from the server since the beginning; None: it is not known."""
        cores = None if self._cores is None else self._cores.read()
        return None if cores is None else disturbance_of([cores])


@contextlib.contextmanager
def _time_limit(seconds: float, watch: _ServerWatch) -> Iterator[None]:
    """Interrupt the block early enough to close within `seconds`, and raise _TimeIsOver.

    The block is interrupted as by Ctrl-C: every server, process and file is closed, and the records
    are kept. The journal names the time limit as the reason. The error says what `watch` saw.
    """
    is_over, disturbance = False, None

    def end(*_: object) -> None:
        nonlocal is_over, disturbance
        is_over = True
        ignore_signals()
        disturbance = watch.disturbance()  # now: the load generator must still run to be known
        raise KeyboardInterrupt(f"the time limit of {seconds:g} s was reached")

    previous_handler = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds - CLOSING_SECONDS)
    try:
        yield
    except (KeyboardInterrupt, LoadError) as problem:
        if not is_over:
            raise
        raise _TimeIsOver(_too_slow_words(seconds, disturbance)) from problem
    finally:
        _stop_clock()
        signal.signal(signal.SIGALRM, previous_handler)


def _too_slow_words(seconds: float, disturbance: Disturbance | None) -> str:
    """Return that the server could not be estimated in time, which program took its cores, and what
    helps."""
    too_slow = f"The server is too slow to be estimated within {seconds:g} s"
    more_time = f"more time, such as --seconds {seconds * MORE_TIME:g}"
    if disturbance is None or not disturbance.is_disturbed:
        return f"{too_slow}. Give {more_time}."
    cause = f"{too_slow}: {disturbance_in_words(disturbance)}."
    if disturbance.who in (HYPERVISOR, CPU_QUOTA):
        return f"{cause} Give {more_time}."
    return f"{cause} What helps: {REMEDIES['other_processes']}, or {more_time}."


def _stop_clock() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _slo_of(options: QuickOptions) -> Slo:
    """Return the SLO of --slo. Raises LoadError for an SLO without a limit on latency."""
    slo = parse_slo_option(options.slo)
    if not slo.limits:
        raise LoadError(
            f"--slo {options.slo!r} has no latency limit: without one, no rate is too high. Give "
            f"at least one of {', '.join(LIMITED_TIMES)}, such as ttft=10."
        )
    return slo


def _shape_of(options: QuickOptions) -> ModelSpec | None:
    """Return the shape of --shape; None: not given. Raises LoadError for an unknown shape."""
    if options.shape is None:
        return None
    try:
        spec = identify(options.shape).spec
    except ModelError as problem:
        raise LoadError(f"--shape {problem}") from problem
    if spec is None:
        raise LoadError(f"--shape {options.shape!r}: its shape is not known here.")
    return spec


def _server_of(options: QuickOptions, progress: Progress) -> LocalServer:
    """Return the server that the user named, else the first that is found on this machine.

    Raises TargetUnusable where no server answers, or none without an API key.
    """
    if options.url is not None:
        url = options.url.strip()
        url = f"http://127.0.0.1:{url}" if url.isdecimal() else url
        url = url if "://" in url else f"http://{url}"
        target = Target(url=url, **_access_of(options))
        check_target(target)
        progress.tick(f"looking at {url}")
        return look_at(target) or LocalServer(url, "unknown", ())
    progress.tick("looking for a server on this machine")
    servers, ports_with_key = find_local_servers(), ports_that_need_a_key()
    if not servers and ports_with_key:
        port = ports_with_key[0]
        raise TargetUnusable(
            f"Port {port} of this machine answers only with an API key. Put the key into an "
            "environment variable and name it, and the port: "
            f"`crossover quick {port} --api-key-env NAME`."
        )
    if not servers:
        ports = ", ".join(f"{port} ({who})" for port, who in USUAL_PORTS.items())
        model = PACKAGED if packaged_file(PACKAGED) is not None else "135m"
        raise TargetUnusable(
            f"No server answers on the usual ports of this machine: {ports}. Start one with "
            f"`crossover serve {model}` and run `crossover quick` in another terminal, or give the "
            "URL of one: `crossover quick http://HOST:PORT`."
        )
    first, *others = servers
    if others:
        other_servers = "; ".join(server.words for server in others)
        progress.say(f"there is also {other_servers}; name one to measure it", style="yellow")
    for port in ports_with_key:
        progress.say(
            f"port {port} answers only with an API key; `crossover quick {port} --api-key-env "
            "NAME` measures what is there",
            style="yellow",
        )
    return first


def _access_of(options: QuickOptions) -> dict[str, Any]:
    """Return the fields of a target that say how it is reached."""
    return {name: getattr(options, name) for name in Access.__struct_fields__}


def _target_of(options: QuickOptions, server: LocalServer, progress: Progress) -> Target:
    """Return the endpoint, with the name of its model and the route that it has.

    Raises LoadError.
    """
    target = Target(
        url=server.url,
        model=options.model or next(iter(server.models), None),
        api="chat" if options.api == "chat" else "completions",
        **_access_of(options),
        timeout_seconds=options.seconds,
        ready_seconds=READY_SECONDS,
    )
    progress.tick(f"asking {server.words} what it can do")
    try:
        facts = probe_endpoint(target)
    except EndpointRefuses:
        if options.api != "auto":
            raise
        target = msgspec.structs.replace(target, api="chat")
        facts = probe_endpoint(target)
    progress.say(f"{server.words}: model {short_model_id(facts.model)}")
    return msgspec.structs.replace(target, model=facts.model)


def _measured(
    options: QuickOptions,
    question: QuickQuestion,
    server: LocalServer,
    shape: ModelSpec | None,
    progress: Progress,
) -> QuickAnswer:
    """Measure the server and return the answer. Raises LoadError."""
    target = question.target
    notes = []
    context_tokens = ask_details(target, target.model or "").context_tokens
    workload = fitting_workload(question.workload, context_tokens)
    if workload != question.workload:
        prompt, answer = workload.limits
        notes.append(
            f"requests are cut to prompts of {prompt:.0f} and answers of {answer:.0f} tokens: the "
            f"server's context has {context_tokens} tokens"
        )
        question = msgspec.structs.replace(question, workload=workload)
    folder = run(quick_plan(question), options.out, progress, command=public_command(sys.argv))
    _stop_clock()  # all is measured: a simulation on a busy machine may take a little longer
    progress.tick("simulating")
    data = read_report(folder)
    failed = failed_requests(data)
    if failed.share > MAX_FAILED_SHARE:
        raise TargetUnusable(
            f"{failed.in_words('single requests')}: the server cannot be measured. Look at its "
            f"log. Their records are in {folder}."
        )
    if failed.failed:
        notes.append(failed.in_words("single requests"))
    return quick_answer(
        _with_shape(data, shape),
        software=SOFTWARE_NAMES[server.software],
        think_seconds=options.think,
        notes=tuple(notes),
    )


def _with_shape(data: ReportData, shape: ModelSpec | None) -> ReportData:
    """Return the run with the shape that the user named."""
    if shape is None:
        return data
    cells = tuple(msgspec.structs.replace(cell, spec=shape) for cell in data.cells)
    return msgspec.structs.replace(data, cells=cells)


def _screen(answer: QuickAnswer, *, needs_trust: bool) -> list[str]:
    """Return the lines of an answer. `needs_trust`: to resume the run needs --trust."""
    trust = " --trust" if needs_trust else ""
    confirm = f"crossover campaign resume {answer.run} --confirm{trust}"
    capacity = answer.capacity
    next_steps = []
    if capacity is not None and capacity.confirm_seconds is not None:
        if answer.grade == "estimated":
            minutes = capacity.confirm_seconds / 60
            next_steps.append(f"To confirm a rate under load ({minutes:.0f} min): {confirm}")
    return [
        "",
        *lines_of(answer),
        "",
        "Markdown:",
        "",
        markdown_of(answer),
        "",
        *next_steps,
        f"The page of this run: crossover report {answer.run}",
    ]


class _QuickProgress(Progress):
    """Shows a campaign's own messages on the line that is overwritten; warnings, and what this
    command says, stay on the screen."""

    def say(self, text: str, style: str | None = None) -> None:
        if text.startswith(("run ", "cell ", "  ready", "complete", "  calibrated")):
            self.tick(text.strip())
        else:
            super().say(text, style)
