"""A library behind our endpoint's /v1/completions: OpenVINO GenAI or onnxruntime-genai, which have
no such server of their own.

    PYTHON endpoint.py ENGINE FOLDER PORT SLOTS CONTEXT_TOKENS ENGINE_CORES HTTP_CORES

Runs in the engine's own environment and imports nothing of ours. One thread drives the library's
own scheduler (continuous batching in OpenVINO; onnxruntime-genai has it on CUDA only, and takes a
fixed batch to its end on a CPU). Answers are greedy and as long as asked.
"""

import asyncio
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer


class Engine(Protocol):
    def add(self, ids: Sequence[int], tokens: int) -> Any:
        """Start a request of `tokens` output tokens; returns its handle."""

    def step(self) -> Iterator[tuple[Any, list[int]]]:
        """Run one step; yields handles with their new tokens."""


Deliver = Callable[[list[int]], object]
Requests = queue.Queue[tuple[list[int], int, Deliver]]  # token ids, output tokens, who is told


class OpenVino:
    def __init__(self, folder: str, slots: int, context: int, threads: int) -> None:
        import openvino_genai

        self._library, self._ids = openvino_genai, 0
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = slots
        config.cache_size = 0
        config.num_kv_blocks = slots * (context // 32 + 2)
        config.enable_prefix_caching = False
        settings = {"INFERENCE_NUM_THREADS": threads}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(folder, config, "CPU", settings)
        self._running: list[Any] = []

    def add(self, ids: Sequence[int], tokens: int) -> Any:
        import openvino

        turn = self._library.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        turn.do_sample = False
        self._ids += 1
        handle = self._pipe.add_request(self._ids, openvino.Tensor(np.array([ids])), turn)
        self._running.append(handle)
        return handle

    def step(self) -> Iterator[tuple[Any, list[int]]]:
        self._pipe.step()
        for handle in list(self._running):
            if handle.can_read():
                yield handle, [i for one in handle.read().values() for i in one.generated_ids]
            if handle.get_status() != self._library.GenerationStatus.RUNNING:
                self._running.remove(handle)


class OnnxRuntime:
    def __init__(self, folder: str, slots: int, context: int, threads: int) -> None:
        import onnxruntime_genai

        self._library = onnxruntime_genai
        config = onnxruntime_genai.Config(folder)
        model = {"decoder": {"session_options": {"intra_op_num_threads": threads}}}
        batch = {"static_batching": {"max_batch_size": slots}}
        config.overlay(json.dumps({"model": model, "engine": batch}))
        self._engine = onnxruntime_genai.Engine(onnxruntime_genai.Model(config))
        self._events = self._engine.create_event_buffer(4 * slots)

    def add(self, ids: Sequence[int], tokens: int) -> Any:
        most = self._library.RequestOptions()
        most.set_max_session_tokens(len(ids) + tokens)
        request = self._engine.create_request(options=most)
        turn = self._library.TurnOptions(request)
        turn.set_do_sample(False)
        turn.set_min_generated_tokens(tokens)
        turn.set_max_generated_tokens(tokens)
        request.begin_turn(np.array(ids, np.int32), turn)
        return request

    def step(self) -> Iterator[tuple[Any, list[int]]]:
        flags = self._library.EngineEventFlags
        for event in self._engine.run(self._events):
            event_flags = int(event.flags)
            if event_flags & int(flags.FAILED):
                raise RuntimeError(f"the engine failed: {event.error_code}")
            yield event.request, [event.token] if event_flags & int(flags.TOKEN) else []
            if event_flags & int(flags.TURN_FINISHED):
                event.request.close()


def drive(engine: Engine, requests: Requests) -> None:
    """Take requests from the queue, and deliver the new tokens of each."""
    open_: dict[int, tuple[Deliver, int]] = {}  # by id of the handle, with the tokens still to come
    handles: dict[int, Any] = {}
    while True:
        while not open_ or not requests.empty():
            ids, tokens, deliver = requests.get()
            handle = engine.add(ids, tokens)
            open_[id(handle)] = deliver, tokens
            handles[id(handle)] = handle
        for handle, found in engine.step():
            if id(handle) in open_:
                deliver, left = open_[id(handle)]
                deliver(found)
                open_[id(handle)] = deliver, left - len(found)
                if left <= len(found):
                    del open_[id(handle)], handles[id(handle)]


def app(tokenizer: Tokenizer, requests: Requests) -> Starlette:
    async def completions(request: Any) -> StreamingResponse:
        body = await request.json()
        loop = asyncio.get_running_loop()
        new_tokens: asyncio.Queue[list[int]] = asyncio.Queue()
        ids, tokens = tokenizer.encode(body["prompt"]).ids, body["max_tokens"]
        requests.put(
            (ids, tokens, lambda new: loop.call_soon_threadsafe(new_tokens.put_nowait, new))
        )

        async def events() -> AsyncIterator[str]:
            left = tokens
            while left > 0:
                new = await new_tokens.get()
                left -= len(new)
                end = None if left > 0 else "length"
                text = tokenizer.decode(new, skip_special_tokens=False)
                yield event(choices=[{"index": 0, "text": text, "finish_reason": end}])
            count = {"prompt_tokens": len(ids), "completion_tokens": tokens}
            yield event(choices=[], usage=count) + "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(_: Any) -> PlainTextResponse:
        return PlainTextResponse("ok")

    ways = [Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=ways)


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def main() -> None:
    kind, folder, port, slots, context, *cores = sys.argv[1:]
    engine_cores, http_cores = ([int(core) for core in each.split(",")] for each in cores)
    kinds: dict[str, Callable[[str, int, int, int], Engine]] = {
        "openvino-genai": OpenVino,
        "onnxruntime-genai": OnnxRuntime,
    }
    requests: Requests = queue.Queue()
    loaded = threading.Event()

    def work() -> None:
        try:
            os.sched_setaffinity(0, engine_cores)  # threads that the engine starts take it over
            engine = kinds[kind](folder, int(slots), int(context), len(engine_cores))
            loaded.set()
            drive(engine, requests)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # or the requests would wait for ever

    threading.Thread(target=work, daemon=True).start()
    loaded.wait()
    os.sched_setaffinity(0, http_cores)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    uvicorn.run(app(tokenizer, requests), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
