"""torch: safetensors on CUDA, ROCm (which torch calls cuda) and, without graphs, the CPU.

Its own forward pass over a KV cache of fixed rows (model.py), for the architectures of
models/hf_config.py. Prompt pieces and decode rows of a step share one pass over the weights.
On a GPU attention is one call of torch's flash kernels (packed.py), a step of decode rows only is a
CUDA graph (cuda_graphs.py), and tokens are drawn on the device (sampler.py). There are as many
slots as fit beside the largest step, which is run once before the KV cache is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from models.hf_config import read_spec
from models.manifest import Progress, read_manifest, verify
from models.spec import ModelSpec
from serving.backends.backend_interface import (
    CAPABILITIES,
    BackendInfo,
    EngineConfig,
    MemoryParts,
)
from serving.backends.kv_rows import RowMap, rider_tokens
from serving.backends.torch.cuda_graphs import DecodeGraphs, bucket_of
from serving.backends.torch.device_transfer import fetch, send
from serving.backends.torch.forward_pass import (
    SlotModel,
    StepBatch,
)
from serving.backends.torch.gpu_sampler import always_drawn, draw, drawable
from serving.backends.torch.load_plan import (
    KINDS_OF_DRAWS,
    KV_NAMES,
    GpuStart,
    Plan,
    check_config,
    check_memory,
    check_options,
    chosen_format,
    device_of,
    is_shortage,
    memory_errors,
    workspace_of,
)
from serving.backends.torch.torch_weights import (
    compute_dtype,
    cpu_has_bf16,
    load,
    predicted_bytes,
    stored_format,
)
from serving.errors import EngineFailed
from serving.sampling.sampler import sample
from serving.sampling.step_rows import DRAWN, Row, Sampled, Tokens


class Flight:
    """See Launched in serving.backends.backend_interface. `rows`: those that want a token, in the
    logits' order."""

    def __init__(self, tokens: Tensor, good: Tensor, rows: list[Row]) -> None:
        self.drawn = tokens  # int64 [n] on the device
        self._place = {row.slot: place for place, row in enumerate(rows)}
        self._host, self._copied = fetch(torch.stack((tokens, good.long())))

    def tokens(self) -> list[Sampled | None]:
        """See serving.backends.backend_interface.Launched.tokens."""
        with memory_errors("a step that was launched"):
            if self._copied is not None:
                self._copied.synchronize()
        tokens, good = self._host.tolist()
        places = [self._place[slot] for slot in sorted(self._place)]
        return [Sampled(tokens[place]) if good[place] else None for place in places]

    def numbered(self, rows: list[Row]) -> list[Row]:
        """The rows of the next step with -1 - n for the n-th token that this one draws."""
        return [
            replace(row, tokens=np.array([-1 - self._place[row.slot]], np.int32))
            if row.tokens[0] == DRAWN
            else row
            for row in rows
        ]


CAN = frozenset(CAPABILITIES)
Made = TypeVar("Made")


class TorchBackend:
    """See serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        options = check_options(config.options, config.device)
        folder = Path(config.model_path)
        self._is_gpu = config.device == "gpu"
        self._device = device = device_of(config.device)
        spec = read_spec(folder, config.model_name)
        manifest = read_manifest(folder)
        if manifest is not None:
            verify(folder, manifest, progress=progress)
        weight_format = chosen_format(config.weight_format, stored_format(folder), device)
        assert options.prefill_chunk is not None
        self._chunk = options.prefill_chunk
        self._device_sampling = bool(options.device_sampling)
        self._runs_ahead = bool(options.run_ahead)
        self._threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        if not self._is_gpu:
            torch.set_num_threads(self._threads)
        dtype = compute_dtype(weight_format, device)
        check_config(config, spec, KV_NAMES[dtype])
        plan = Plan(config, options, spec, dtype, device)
        predicted = plan.predicted(predicted_bytes(spec, weight_format))
        start = GpuStart(plan) if self._is_gpu else None
        if config.check_memory:
            check_memory(plan.least(predicted), config.device, options.margin)
        with memory_errors("loading the weights"), torch.inference_mode():
            weights = load(
                *(folder, spec, weight_format, device, progress),
                uplink=None if start is None else start.watch.uplink,
            )
            slots = config.slots if start is None else start.slots_that_fit(weights)
            self._model: SlotModel | None = plan.new_model(weights, slots)
        # A full row has one more column for a dummy token (cache_width): every row can ride along.
        price = self._rider_price(spec, plan.token_bytes)
        self._rows = RowMap(slots, config.context_tokens, price, spare_tokens=1)
        self._columns = torch.arange(self._model.width, device=device)
        self._logits: Tensor | None = None  # of every step on a GPU
        self._graphs: DecodeGraphs | None = None
        if start is not None:
            with memory_errors("making graphs and a first step"), torch.inference_mode():
                self._logits, self._graphs = start.graphs(self._model, slots, progress)
                progress("first step", None)
                start.watch.first_step(lambda: self._warm_up(slots))
        gpu = None if start is None else start.watch.account()
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name=torch.cuda.get_device_name(device) if self._is_gpu else "CPU",
            slots=slots,
            context_tokens=config.context_tokens,
            kv_tokens=plan.kv_tokens(slots),
            vocabulary=spec.vocabulary,
            weight_format=weight_format,
            step_tokens=plan.step_tokens,
            predicted=predicted,
            measured=MemoryParts(weights.bytes, self._model.kv_bytes, workspace_of(gpu)),
            capabilities=CAN,
            details=self._details(plan, weight_format) | (start.doubts if start else {}),
            gpu=gpu,
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        """See serving.backends.backend_interface.Backend.step."""
        drawn = self._stepped(rows, lambda model: self._run_and_draw(model, rows))
        return [drawn[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def launch(self, rows: list[Row], after: Flight | None) -> Flight | None:
        """See `launch` in serving.backends.backend_interface."""
        wanting = [row for row in rows if row.wants_token]
        if not self._runs_ahead or not all(always_drawn(row) for row in wanting):
            return None
        drawn = None
        if after is not None:
            rows, drawn = after.numbered(rows), after.drawn
        return self._stepped(rows, lambda model: self._launched(model, rows, drawn))

    def _stepped(self, rows: list[Row], run: Callable[[SlotModel], Made]) -> Made:
        """What `run` makes of a step. On a GPU a step that found no memory is tried once more, with
        what the allocator had kept given back: a step writes the same entries again."""
        if self._model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            self._rows.place_of(row)
        held = {row.slot: self._rows.length[self._rows.row_of[row.slot]] for row in rows}
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            try:
                return run(self._model)
            except RuntimeError as problem:
                if not (self._is_gpu and is_shortage(problem)):
                    raise
            torch.cuda.empty_cache()
            for slot, length in held.items():
                self._rows.length[self._rows.row_of[slot]] = length
            return run(self._model)

    def _run_and_draw(self, model: SlotModel, rows: list[Row]) -> dict[int, Sampled]:
        logits, wanted = self._run(model, rows)
        return dict(zip([row.slot for row in wanted], self._draw(logits, wanted), strict=True))

    def _launched(self, model: SlotModel, rows: list[Row], drawn: Tensor | None) -> Flight:
        logits, wanted = self._run(model, rows, drawn)
        return Flight(*draw(logits, wanted), wanted)

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See serving.backends.backend_interface.Backend.copy."""
        a, b = self._rows.copied(source, target, tokens)
        if a != b and self._model is not None:
            self._model.copy(a, b, tokens)

    def truncate(self, slot: int, tokens: int) -> None:
        """See serving.backends.backend_interface.Backend.truncate."""
        self._rows.truncate(slot, tokens)

    def close(self) -> None:
        """See serving.backends.backend_interface.Backend.close."""
        self._model = None
        self._graphs = None
        self._logits = None
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _run(
        self, model: SlotModel, rows: list[Row], drawn: Tensor | None = None
    ) -> tuple[Tensor, list[Row]]:
        """Logits of the rows that want a token, and these rows in the logits' order. `drawn`: see
        serving.backends.torch.flight.known."""
        decoding = [row for row in rows if len(row.tokens) == 1]
        filling = [row for row in rows if len(row.tokens) > 1]
        for row in decoding:
            self._rows.length[self._rows.row_of[row.slot]] = row.start
        if decoding and not filling and self._graphs is not None:
            return self._run_graph(self._graphs, model, decoding, drawn)
        return self._run_eager(model, decoding, filling, drawn)

    def _run_graph(
        self, graphs: DecodeGraphs, model: SlotModel, rows: list[Row], drawn: Tensor | None
    ) -> tuple[Tensor, list[Row]]:
        places = [self._rows.row_of[row.slot] for row in rows]
        small = bucket_of(len(rows), graphs.batches)
        if bucket_of(max(places) + 1, graphs.batches) > small:
            # One copy of a row's KV is cheaper than a bigger batch at every step to come.
            free = [place for place in range(small) if place not in places]
            for place in sorted(place for place in places if place >= small):
                self._swap(model, place, free.pop())
            places = [self._rows.row_of[row.slot] for row in rows]
        batch = bucket_of(max(places) + 1, graphs.batches)
        ids = [0] * batch
        for row, place in zip(rows, places, strict=True):
            ids[place] = int(row.tokens[0])
        pairs = zip(places, rows, strict=True)
        wanted = sorted((place, row.slot) for place, row in pairs if row.wants_token)
        at = [place for place, _ in wanted]
        host = _host([*ids, *self._rows.length[:batch], *at], self._device)
        longest = max(self._rows.length[place] for place in places) + 1
        logits, at_device = graphs.run(host, batch, longest, drawn)
        for place in places:
            self._rows.length[place] += 1
        by_slot = {row.slot: row for row in rows}
        asking = [by_slot[slot] for _, slot in wanted]
        if at == list(range(len(at))):
            return logits[: len(at)], asking
        return logits.index_select(0, at_device), asking

    def _run_eager(
        self, model: SlotModel, decoding: list[Row], filling: list[Row], drawn: Tensor | None
    ) -> tuple[Tensor, list[Row]]:
        """One pass over everything, after passes for the beginnings of long prompts."""
        pieces = [(row, *self._run_ahead(model, row)) for row in filling]
        batch = StepBatch(model, self._rows, self._columns)
        if decoding:
            batch.add_decode(decoding, self._places(model, [row.slot for row in decoding]))
        for row, tokens, start in pieces:
            batch.add_prompt(row, tokens, start)
        return batch.run(self._logits, drawn), batch.wanted

    def _places(self, model: SlotModel, slots: list[int]) -> Sequence[int]:
        """The KV rows of a pass's decode rows: for plain attention side by side, with riders.
        Packed attention needs none, and a rider may be the row of a prompt in the same pass: both
        would be written to one place at once."""
        if model.is_packed:
            return sorted(self._rows.row_of[slot] for slot in slots)
        window = self._rows.window(slots)
        for a, b in window.swaps:
            self._swap(model, a, b)
        return range(window.lo, window.hi)

    def _run_ahead(self, model: SlotModel, row: Row) -> tuple[Tokens, int]:
        """All but the last chunk of a prompt row; returns the last chunk and where it starts."""
        last = (len(row.tokens) - 1) // self._chunk * self._chunk
        silent = replace(row, wants_token=False) if last else row
        for first in range(0, last, self._chunk):
            batch = StepBatch(model, self._rows, self._columns)
            batch.add_prompt(silent, row.tokens[first : first + self._chunk], row.start + first)
            batch.run(self._logits)
        return row.tokens[last:], row.start + last

    def _draw(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        if not rows:
            if self._is_gpu:  # else what the GPU still has to do would be the next step's time
                torch.cuda.synchronize()
            return []
        if not self._device_sampling:
            return sample(logits.cpu().numpy(), rows)
        tokens, good = draw(logits, rows)
        # One copy to the host, which waits for the step.
        both = torch.stack((tokens, good.long())).cpu().tolist()
        drawn = zip(rows, *both, strict=True)
        found = [Sampled(token) if good and drawable(row) else None for row, token, good in drawn]
        rest = [index for index, one in enumerate(found) if one is None]
        if rest:
            (at,) = send([np.array(rest)], self._device)
            values = logits[at].cpu().numpy()
            late = dict(zip(rest, sample(values, [rows[index] for index in rest]), strict=True))
            found = [late.get(index, one) for index, one in enumerate(found)]
        return [one for one in found if one is not None]

    def _swap(self, model: SlotModel, a: int, b: int) -> None:
        model.swap(a, b, self._rows.length[a], self._rows.length[b])
        self._rows.swap(a, b)

    def _warm_up(self, slots: int) -> None:
        """A prompt, draws of each kind, a mixed step and a copy: what they load and build must not
        fall on the first request."""
        assert self._model is not None
        room = self._rows.context_tokens
        count = max(1, min(self._chunk, room - len(KINDS_OF_DRAWS)))
        prompt, one = np.zeros(count, np.int32), np.zeros(1, np.int32)
        self._run_and_draw(self._model, [Row(0, prompt, 0, True)])
        for index, sampling in enumerate(KINDS_OF_DRAWS[: room - count]):
            self._run_and_draw(self._model, [Row(0, one, count + index, True, sampling)])
        if self._runs_ahead and room > 1:
            flight = self._launched(self._model, [Row(0, one, 0, True)], None)
            rows = flight.numbered([Row(0, np.array([DRAWN], np.int32), 1, True)])
            self._launched(self._model, rows, flight.drawn).tokens()
        last = slots - 1
        if last and room > count:
            rows = [Row(0, one, count, True), Row(last, np.zeros(2, np.int32), 0, True)]
            self._run_and_draw(self._model, rows)
            self.copy(0, last, 2)
            self._swap(self._model, 0, last)
        for slot in (0, last):
            self.truncate(slot, 0)

    def _rider_price(self, spec: ModelSpec, token_bytes: int) -> float:
        """See kv_slots. On a GPU a row more in a bucket costs next to nothing."""
        if self._is_gpu:
            return 0.0
        return rider_tokens(spec.flops_per_token(), self._threads, token_bytes)

    def _details(self, plan: Plan, weight_format: str) -> dict[str, str]:
        dtype, options = plan.dtype, plan.options
        type_name = str(dtype).removeprefix("torch.")
        version = str(torch.__version__)  # a class of its own, which no message can carry
        details = {"torch": version, "compute_dtype": type_name, "kv_dtype": KV_NAMES[dtype]}
        if self._is_gpu:
            details["attention"] = "flash" if plan.uses_flash else "sdpa"
            details["prefill_chunk"] = str(self._chunk)
            details["graphs"] = str(options.graphs).lower()
            details["device_sampling"] = str(options.device_sampling).lower()
            details["run_ahead"] = str(options.run_ahead).lower()
            hip, cuda = torch.version.hip, torch.version.cuda
            details["runtime"] = f"ROCm {hip}" if hip else f"CUDA {cuda}"
            return details
        details["threads"] = str(self._threads)
        details["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        if not cpu_has_bf16() and weight_format == "bf16":
            details["bf16"] = (
                "no arithmetic on this CPU: weights are widened block by block, activations and "
                "KV cache are float32"
            )
        return details


def _host(values: list[int], device: torch.device) -> Tensor:
    """int64 on the host, page-locked where a GPU will copy it."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
