"""torch: safetensors on CUDA, ROCm (which torch calls cuda) and, without graphs, the CPU.

Its own forward pass over a KV cache of fixed rows (forward_pass.py), for the architectures of
models/hf_config.py. Prompt pieces and decode rows of a step share one pass over the weights.
On a GPU attention is one call of torch's flash kernels (varlen_attention.py), a step of decode rows
only is a CUDA graph (cuda_graphs.py), and tokens are drawn on the device (gpu_sampler.py). There
are as many slots as fit beside the largest step, which is run once before the KV cache is made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.manifest import Progress
from serving.backends.backend_interface import CAPABILITIES, BackendInfo, EngineConfig, MemoryParts
from serving.backends.kv_rows import RowMap, rider_tokens
from serving.backends.torch.cuda_graphs import DecodeGraphs, bucket_of
from serving.backends.torch.device_transfer import fetch, send
from serving.backends.torch.forward_pass import Piece, SlotModel, run_pass
from serving.backends.torch.gpu_sampler import always_drawn, draw, drawable
from serving.backends.torch.load_plan import (
    KINDS_OF_DRAWS,
    KV_NAMES,
    Plan,
    check_memory,
    memory_errors,
    plan_of,
    slots_that_fit,
)
from serving.backends.torch.torch_weights import cpu_has_bf16, load
from serving.errors import EngineFailed
from serving.sampling.sampler import sample
from serving.sampling.step_rows import DRAWN, Row, Sampled, Tokens

_DUMMY: Tokens = np.zeros(1, np.int32)


class Flight:
    """See Launched in serving.backends.backend_interface. `rows`: those that want a token, in the
    logits' order."""

    def __init__(self, tokens: Tensor, good: Tensor, rows: list[Row]) -> None:
        self.drawn = tokens  # int64 [n] on the device
        self._place = {row.slot: place for place, row in enumerate(rows)}
        self._host, self._copied = fetch(torch.stack((tokens, good.long())))

    def tokens(self) -> list[Sampled | None]:
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


class TorchBackend:
    """See serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        plan = plan_of(config, progress)
        self._is_gpu, self._device = plan.is_gpu, plan.device
        self._chunk = plan.prefill_chunk
        self._device_sampling = plan.draws_on_device
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        slots, doubts, free_bytes = config.slots, {}, 0
        if not self._is_gpu:
            torch.set_num_threads(threads)
        else:
            # From torch 2.11 on cuDNN comes first on sm_90 and newer, and builds a plan of 40 ms or
            # more for every new shape: a stall a step where lengths grow (pytorch issue 191576).
            torch.backends.cuda.enable_cudnn_sdp(False)
            free_bytes, _ = torch.cuda.mem_get_info()
        if config.check_memory:
            check_memory(plan)
        with memory_errors("loading the weights"), torch.inference_mode():
            weights = load(plan.checkpoint, plan.spec, plan.weight_format, self._device, progress)
            if self._is_gpu:
                slots = slots_that_fit(plan, weights, free_bytes)
            self._model: SlotModel | None = plan.new_model(weights, slots)
        if slots < config.slots:
            doubts["slots"] = f"{slots} of {config.slots}: more have no room for their KV cache"
        # A full row has one more column for a dummy token (cache_width): every row can ride along.
        # On a GPU a row more in a bucket costs next to nothing.
        price = rider_tokens(plan.spec.flops_per_token(), threads, plan.token_bytes)
        price = 0.0 if self._is_gpu else price
        self._rows = RowMap(slots, config.context_tokens, price, spare_tokens=1)
        self._logits: Tensor | None = None  # of every step on a GPU
        self._graphs: DecodeGraphs | None = None
        compute_bytes = None
        if self._is_gpu:
            with memory_errors("making graphs and a first step"), torch.inference_mode():
                doubts |= self._make_graphs(plan, self._model, progress)
                progress("first step", None)
                self._warm_up(self._model, slots)
                torch.cuda.synchronize()
            kept = weights.bytes + self._model.kv_bytes
            compute_bytes = max(0, torch.cuda.memory_reserved() - kept)
        for key, what in doubts.items():
            print(f"torch: {key} {what}", file=sys.stderr, flush=True)
        whole = slots * config.context_tokens
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name=torch.cuda.get_device_name(self._device) if self._is_gpu else "CPU",
            slots=slots,
            context_tokens=config.context_tokens,
            kv_tokens=min(config.kv_tokens or whole, whole),
            vocabulary=plan.spec.vocabulary,
            weight_format=plan.weight_format,
            step_tokens=plan.step_tokens,
            predicted=plan.predicted(),
            measured=MemoryParts(weights.bytes, self._model.kv_bytes, compute_bytes),
            capabilities=frozenset(CAPABILITIES),
            details=_details(plan, threads) | doubts,
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(rows)
            tokens = self._draw(logits, wanted)
        drawn = {row.slot: token for row, token in zip(wanted, tokens, strict=True)}
        return [drawn[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def launch(self, rows: list[Row], after: Flight | None) -> Flight | None:
        wanting = [row for row in rows if row.wants_token]
        if not self._device_sampling or not all(always_drawn(row) for row in wanting):
            return None
        drawn = None
        if after is not None:
            rows, drawn = after.numbered(rows), after.drawn
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(rows, drawn)
            return Flight(*draw(logits, wanted), wanted)

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        a, b = self._rows.copied(source, target, tokens)
        if a != b and self._model is not None:
            self._model.cache.copy(a, b, tokens)

    def truncate(self, slot: int, tokens: int) -> None:
        self._rows.truncate(slot, tokens)

    def close(self) -> None:
        self._model = self._graphs = self._logits = None
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _run(self, rows: list[Row], drawn: Tensor | None = None) -> tuple[Tensor, list[Row]]:
        """Logits of the rows that want a token, and these rows in the logits' order. `drawn`: see
        forward_pass.known."""
        model = self._model
        if model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            self._rows.place_of(row)
        decoding = [row for row in rows if len(row.tokens) == 1]
        filling = [row for row in rows if len(row.tokens) > 1]
        for row in decoding:
            self._rows.length[self._rows.row_of[row.slot]] = row.start
        if decoding and not filling and self._graphs is not None:
            return self._run_graph(self._graphs, model, decoding, drawn)
        # One pass over everything, after passes for the beginnings of long prompts.
        begun = [(row, *self._begun(model, row)) for row in filling]
        pieces = self._decoding(model, decoding) if decoding else []
        count = len(pieces)
        for row, tokens, start in begun:  # their KV rows may have been swapped just now
            pieces.append((row, self._rows.row_of[row.slot], tokens, start))
        return run_pass(model, self._rows, pieces, count, self._logits, drawn)

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
        pairs = sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])
        asking = [row for _, row in pairs if row.wants_token]
        at = [place for place, row in pairs if row.wants_token]
        host = torch.tensor(
            [*ids, *self._rows.length[:batch], *at],
            dtype=torch.int64,
            pin_memory=self._device.type == "cuda",
        )
        longest = max(self._rows.length[place] for place in places) + 1
        logits, at_device = graphs.run(host, batch, longest, drawn)
        for place in places:
            self._rows.length[place] += 1
        if at == list(range(len(at))):
            return logits[: len(at)], asking
        return logits.index_select(0, at_device), asking

    def _decoding(self, model: SlotModel, rows: list[Row]) -> list[Piece]:
        """Rows of one token by KV row: for plain attention side by side, with riders."""
        places: Sequence[int] = sorted(self._rows.row_of[row.slot] for row in rows)
        if not model.is_flash:
            window = self._rows.window([row.slot for row in rows])
            for a, b in window.swaps:
                self._swap(model, a, b)
            places = range(window.lo, window.hi)
        by_place = {self._rows.row_of[row.slot]: row for row in rows}
        pieces: list[Piece] = []
        for place in places:
            row = by_place.get(place)
            tokens = _DUMMY if row is None else row.tokens
            pieces.append((row, place, tokens, self._rows.length[place]))
        return pieces

    def _begun(self, model: SlotModel, row: Row) -> tuple[Tokens, int]:
        """Runs all but the last chunk of a prompt row; that chunk, and where it starts."""
        last = (len(row.tokens) - 1) // self._chunk * self._chunk
        silent, place = replace(row, wants_token=False), self._rows.row_of[row.slot]
        for first in range(0, last, self._chunk):
            tokens = row.tokens[first : first + self._chunk]
            run_pass(model, self._rows, [(silent, place, tokens, row.start + first)])
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
        model.cache.swap(a, b, self._rows.length[a], self._rows.length[b])
        self._rows.swap(a, b)

    def _make_graphs(self, plan: Plan, model: SlotModel, progress: Progress) -> dict[str, str]:
        """The decode step; without graphs where they cannot be captured, which is told: eager steps
        are slower, not wrong."""
        slots = len(self._rows.length)
        self._logits = torch.empty(slots, plan.spec.vocabulary, device=self._device)
        told: dict[str, str] = {}
        for capture in (plan.has_graphs, False):
            try:
                self._graphs = DecodeGraphs(model, slots, self._logits, capture, progress)
                break
            except RuntimeError as problem:
                torch.cuda.empty_cache()
                why = (str(problem).splitlines() or [type(problem).__name__])[0]
                told["graphs"] = f"false: the decode step could not be captured: {why}"
        return told

    def _warm_up(self, model: SlotModel, slots: int) -> None:
        """A prompt, draws of each kind, a mixed step and a copy: what they load and build must not
        fall on the first request."""
        room, one = self._rows.context_tokens, np.zeros(1, np.int32)
        count = max(1, min(self._chunk, room - len(KINDS_OF_DRAWS)))
        self.step([Row(0, np.zeros(count, np.int32), 0, True)])
        for index, sampling in enumerate(KINDS_OF_DRAWS[: room - count]):
            self.step([Row(0, one, count + index, True, sampling)])
        if room > 1:
            flight = self.launch([Row(0, one, 0, True)], None)
            if flight is not None:
                self.launch([Row(0, np.array([DRAWN], np.int32), 1, True)], flight)
        last = slots - 1
        if last and room > count:
            self.step([Row(0, one, 1, True), Row(last, np.zeros(2, np.int32), 0, True)])
            self.copy(0, last, 2)
            self._swap(model, 0, last)
        for slot in (0, last):
            self.truncate(slot, 0)


def _details(plan: Plan, threads: int) -> dict[str, str]:
    details = {
        "torch": str(torch.__version__),  # a class of its own, which no message can carry
        "compute_dtype": str(plan.dtype).removeprefix("torch."),
        "kv_dtype": KV_NAMES[plan.dtype],
        "prefill_chunk": str(plan.prefill_chunk),
    }
    if plan.is_gpu:
        hip, cuda = torch.version.hip, torch.version.cuda
        return details | {
            "attention": "flash" if plan.is_flash else "sdpa",
            "graphs": str(plan.has_graphs).lower(),
            "device_sampling": str(plan.draws_on_device).lower(),
            "runtime": f"ROCm {hip}" if hip else f"CUDA {cuda}",
        }
    details["threads"] = str(threads)
    details["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if not cpu_has_bf16() and plan.weight_format == "bf16":
        details["bf16"] = (
            "no arithmetic on this CPU: weights are widened block by block, activations and KV "
            "cache are float32"
        )
    return details
