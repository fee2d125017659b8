"""torch: safetensors on CUDA, ROCm (which torch calls cuda) and, without graphs, the CPU.

Its own forward pass over a KV cache of fixed rows (model.py), for the architectures of
models/readers/config.py. Prompt pieces and decode rows of a step share one pass over the weights.
On a GPU a step of decode rows only is a CUDA graph (cuda_graphs.py), and tokens are drawn on the
device (sampler.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.manifest import read_manifest, verify
from models.readers.config import read_spec
from models.spec import ModelSpec
from serving.backends.base import CAPABILITIES, BackendInfo, EngineConfig, MemoryParts
from serving.backends.kv_slots import RowMap, rider_tokens
from serving.backends.torch.cuda_graphs import DecodeGraphs, bucket_of
from serving.backends.torch.matrices import compute_dtype, cpu_has_bf16
from serving.backends.torch.model import SlotModel, cache_width
from serving.backends.torch.sampler import draw, drawable
from serving.backends.torch.settings import (
    KV_NAMES,
    TorchOptions,
    check_config,
    check_memory,
    check_options,
    chosen_format,
    compute_bytes,
    device_of,
    memory_errors,
)
from serving.backends.torch.step_batch import StepBatch
from serving.backends.torch.weights import load, predicted_bytes, stored_format
from serving.errors import EngineFailed
from serving.sampling.sampler import sample
from serving.sampling.types import Row, Sampled, Tokens

CAN = frozenset(CAPABILITIES)
Progress = Callable[[str, float | None], None]


class TorchBackend:
    """See serving.backends.base.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        options = check_options(config.options, config.device)
        folder = Path(config.model_path)
        self._device = device = device_of(config.device)
        spec = read_spec(folder, config.model_name)
        manifest = read_manifest(folder)
        if manifest is not None:
            verify(folder, manifest, progress=progress)
        weight_format = chosen_format(config.weight_format, stored_format(folder), device)
        self._chunk = options.prefill_chunk
        self._device_sampling = bool(options.device_sampling)
        self._threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        if device.type == "cpu":
            torch.set_num_threads(self._threads)
        slots, context = config.slots, config.context_tokens
        dtype = compute_dtype(weight_format, device)
        check_config(config, spec, KV_NAMES[dtype])
        token_bytes = spec.kv_bytes_per_token("bf16") * dtype.itemsize // 2
        predicted = MemoryParts(
            predicted_bytes(spec, weight_format),
            slots * cache_width(context) * token_bytes,
            compute_bytes(spec, slots, self._chunk),
        )
        if config.check_memory:
            check_memory(predicted, device, options.margin)
        with memory_errors("loading the weights"), torch.inference_mode():
            weights = load(folder, spec, weight_format, device, progress)
            self._model: SlotModel | None = SlotModel(spec, weights, slots, context, dtype, device)
            self._graphs = self._decode_graphs(slots, options, progress)
        # A full row has one more column for a dummy token (cache_width): every row can ride along.
        price = self._rider_price(spec, token_bytes)
        self._rows = RowMap(slots, context, price, spare_tokens=1)
        self._columns = torch.arange(self._model.width, device=device)
        held = weights.bytes + self._model.kv_bytes
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
            slots=slots,
            context_tokens=context,
            kv_tokens=min(config.kv_tokens or slots * context, slots * context),
            vocabulary=spec.vocabulary,
            weight_format=weight_format,
            step_tokens=max(512, 2 * slots, self._chunk),
            predicted=predicted,
            measured=MemoryParts(weights.bytes, self._model.kv_bytes, self._reserved(held)),
            capabilities=CAN,
            details=self._details(options, dtype, weight_format),
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        """See serving.backends.base.Backend.step."""
        if self._model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            self._rows.place_of(row)
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(self._model, rows)
            drawn = dict(zip([row.slot for row in wanted], self._draw(logits, wanted), strict=True))
        return [drawn[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See serving.backends.base.Backend.copy."""
        a, b = self._rows.copied(source, target, tokens)
        if a != b and self._model is not None:
            self._model.copy(a, b, tokens)

    def truncate(self, slot: int, tokens: int) -> None:
        """See serving.backends.base.Backend.truncate."""
        self._rows.truncate(slot, tokens)

    def close(self) -> None:
        """See serving.backends.base.Backend.close."""
        self._model = None
        self._graphs = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, model: SlotModel, rows: list[Row]) -> tuple[Tensor, list[Row]]:
        """Logits of the rows that want a token, and these rows in the logits' order."""
        decoding = [row for row in rows if len(row.tokens) == 1]
        filling = [row for row in rows if len(row.tokens) > 1]
        for row in decoding:
            self._rows.length[self._rows.row_of[row.slot]] = row.start
        if decoding and not filling and self._graphs is not None:
            return self._run_graph(self._graphs, model, decoding)
        return self._run_eager(model, decoding, filling)

    def _run_graph(
        self, graphs: DecodeGraphs, model: SlotModel, rows: list[Row]
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
        ids = _host([0] * batch, self._device)
        positions = _host(self._rows.length[:batch], self._device)
        for row, place in zip(rows, places, strict=True):
            ids[place] = int(row.tokens[0])
        logits = graphs.run(ids, positions, max(self._rows.length[place] for place in places) + 1)
        for place in places:
            self._rows.length[place] += 1
        wanted = [(row, place) for row, place in zip(rows, places, strict=True) if row.wants_token]
        at = torch.tensor([place for _, place in wanted], dtype=torch.int64, device=self._device)
        return logits.index_select(0, at), [row for row, _ in wanted]

    def _run_eager(
        self, model: SlotModel, decoding: list[Row], filling: list[Row]
    ) -> tuple[Tensor, list[Row]]:
        """One pass over everything, after passes for the beginnings of long prompts."""
        pieces = [(row, *self._run_ahead(model, row)) for row in filling]
        batch = StepBatch(model, self._rows, self._columns)
        if decoding:
            window = self._rows.window([row.slot for row in decoding])
            for a, b in window.swaps:
                self._swap(model, a, b)
            batch.add_decode(decoding, window)
        for row, tokens, start in pieces:
            batch.add_prompt(row, tokens, start)
        return batch.run(), batch.wanted

    def _run_ahead(self, model: SlotModel, row: Row) -> tuple[Tokens, int]:
        """All but the last chunk of a prompt row; returns the last chunk and where it starts."""
        last = (len(row.tokens) - 1) // self._chunk * self._chunk
        silent = replace(row, wants_token=False) if last else row
        for first in range(0, last, self._chunk):
            batch = StepBatch(model, self._rows, self._columns)
            batch.add_prompt(silent, row.tokens[first : first + self._chunk], row.start + first)
            batch.run()
        return row.tokens[last:], row.start + last

    def _draw(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        if not rows:
            return []
        if not self._device_sampling:
            return sample(logits.cpu().numpy(), rows)
        here = [index for index, row in enumerate(rows) if drawable(row)]
        out: dict[int, Sampled] = {}
        if here:
            subset = logits
            if len(here) != len(rows):
                subset = logits[torch.tensor(here, device=self._device)]
            tokens, good = draw(subset, [rows[index] for index in here])
            # One copy to the host, which waits for the step.
            both = torch.stack((tokens, good.long())).cpu().tolist()
            drawn = zip(here, *both, strict=True)
            out = {index: Sampled(token) for index, token, is_good in drawn if is_good}
        rest = [index for index in range(len(rows)) if index not in out]
        if rest:
            values = logits[torch.tensor(rest, device=self._device)].cpu().numpy()
            out.update(zip(rest, sample(values, [rows[index] for index in rest]), strict=True))
        return [out[index] for index in range(len(rows))]

    def _swap(self, model: SlotModel, a: int, b: int) -> None:
        model.swap(a, b, self._rows.length[a], self._rows.length[b])
        self._rows.swap(a, b)

    def _decode_graphs(
        self, slots: int, options: TorchOptions, progress: Progress
    ) -> DecodeGraphs | None:
        if self._device.type == "cpu" or self._model is None:
            return None
        capture = bool(options.graphs)
        return DecodeGraphs(self._model, slots, capture=capture, progress=progress)

    def _rider_price(self, spec: ModelSpec, token_bytes: int) -> float:
        """See kv_slots. On a GPU a row more in a bucket costs next to nothing."""
        if self._device.type != "cpu":
            return 0.0
        return rider_tokens(spec.flops_per_token(), self._threads, token_bytes)

    def _reserved(self, accounted: int) -> int | None:
        """Device memory beyond weights and KV: graph pool and workspaces; None on the CPU."""
        if self._device.type != "cuda":
            return None
        return max(0, torch.cuda.memory_reserved(self._device) - accounted)

    def _details(
        self, options: TorchOptions, dtype: torch.dtype, weight_format: str
    ) -> dict[str, str]:
        type_name = str(dtype).removeprefix("torch.")
        version = str(torch.__version__)  # a class of its own, which no message can carry
        details = {"torch": version, "compute_dtype": type_name, "kv_dtype": KV_NAMES[dtype]}
        if self._device.type == "cuda":
            details["graphs"] = str(options.graphs).lower()
            details["device_sampling"] = str(options.device_sampling).lower()
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
