"""From `crossover serve MODEL --on ray` to a server that answers: cluster, replicas, front.

The port is bound before Ray starts, and answers 503 until a replica is ready; signals drain as on a
server without replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

import msgspec

from models.cache import CACHE_VARIABLE
from models.ladder import is_rung
from serving.cli.console import Narrator
from serving.cli.files import keys_of, write_ready_file
from serving.cli.launch import Work, begin, endpoint, limits_of, opened, run, serve
from serving.http.app import App
from serving.http.limits import Limits
from serving.metrics import ServerMetrics
from serving.ray.cluster import deploy, failure, withdraw
from serving.ray.connection import connect, disconnect
from serving.ray.fleet import FLEET
from serving.ray.front import LOOK_SECONDS, Front
from serving.ray.share import Share, nodes_of, share_of
from serving.registry.model import ModelRouter
from serving.registry.options import ServeOptions, models_of

START_LOOK_SECONDS = 0.2  # between two looks at replicas that are being started
LARGEST_BODY_BYTES = 4 << 20  # here; the replicas know their context and may allow less


def launch_on_ray(options: ServeOptions) -> int:
    """Serve until a signal comes; the exit status as of serving.cli.launch.launch."""
    narrator = begin(options)
    keys, _ = keys_of(options)
    limits = limits_of(options, narrator)
    (model,) = models_of(options)
    options = _absolute(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(opened(options, keys, narrator))
        nodes = nodes_of(connect())
        stack.callback(disconnect)
        stack.callback(withdraw)
        share = share_of(nodes, options)
        narrator.say(f"{share.words}, on {len(nodes)} node{'' if len(nodes) == 1 else 's'}")
        front = Front(model.name or model.source, options.load_wait_seconds, options.slots)
        router = ModelRouter(ServerMetrics())
        narrator.on_lost = router.metrics.lost_lines.inc
        front.count_in(router)
        body_bytes = limits.body_bytes or LARGEST_BODY_BYTES
        here = msgspec.structs.replace(limits, body_bytes=body_bytes)
        app = App(router, here, keys, front.routes())
        work = Work(
            what=share.words,
            start=_nothing,
            announce=lambda url: _announce(front, options, limits, share, (url, narrator)),
            stop=front.stop,
            in_flight=lambda: front.in_flight,
        )
        return run(serve(options, work, [endpoint(options, app, listener, keys)], narrator))


def _absolute(options: ServeOptions) -> ServeOptions:
    """The options with paths that mean the same in a replica, which stands in another folder."""
    (source,) = options.models
    if source != "fake" and not is_rung(source) and os.path.exists(source):
        source = os.path.abspath(source)
    cache = options.cache or os.environ.get(CACHE_VARIABLE)
    cache = None if cache is None else os.path.abspath(cache)
    return msgspec.structs.replace(options, models=(source,), cache=cache)


async def _nothing() -> None:
    return


async def _announce(
    front: Front,
    options: ServeOptions,
    limits: Limits,
    share: Share,
    whom: tuple[str, Narrator],
) -> str:
    """Start the replicas, and tell of each change of them. Returns why none can serve."""
    url, narrator = whom
    try:
        front.opened(await asyncio.to_thread(deploy, options, limits, share))
    except Exception as problem:
        return f"Ray Serve cannot be started: {problem}"
    told: dict[str, str] = {}
    while True:
        front.find()
        now = FLEET.replicas
        if not now and not told and (why := await asyncio.to_thread(failure)) is not None:
            return why
        for name in now.keys() - told.keys():
            narrator.say(f"replica {name} serves, on node {now[name][:8]}")
        for name in told.keys() - now.keys():
            narrator.say(f"replica {name} is gone")
        if now and not told:
            with contextlib.suppress(OSError):  # nobody reads our standard output
                print(f"ready: {url} ({share.words})", flush=True)
        if now != told:
            content = {"url": url, "pid": os.getpid(), "replicas": now}
            write_ready_file(options.ready_file, content, narrator)
        told = now
        await asyncio.sleep(LOOK_SECONDS if told else START_LOOK_SECONDS)
