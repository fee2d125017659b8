"""torch: safetensors on CUDA, ROCm (which torch calls cuda) and, as the same code without graphs, the CPU.

    config = EngineConfig(backend="torch", model_path="Llama-3.2-1B/", model_name="llama-3.2-1b", device="gpu", weight_format="bf16")
    backend = TorchBackend(config, progress)

Its own forward pass over a KV cache of fixed rows (torch_model.py) for the architectures that it knows (models/hf_config.py); any other
is refused by name. Prompt pieces and decode rows of a step share one pass over the weights. A step with nothing but decode rows is a
captured CUDA graph on a GPU (torch_graphs.py), and tokens are drawn there too (torch_sampling.py).

Options (`--option key=value`):
  graphs          true | false; CUDA graphs. Default: true on a GPU
  device_sampling true | false; draw on the device. Default: true on a GPU
  margin          share of the GPU's memory left free, 0 to 0.9; default 0.1
  prefill_chunk   most prompt tokens of one pass; default 512
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.hf_config import read_spec
from models.manifest import read_manifest, verify
from serving.backends.base import CAPABILITIES, BackendInfo, EngineConfig, MemoryParts, Row, Sampled
from serving.backends.kv_rows import RowMap, Window, rider_tokens
from serving.backends.torch_graphs import DecodeGraphs, bucket_of
from serving.backends.torch_model import DecodeSpan, PromptSpan, SlotModel, additive_mask, cache_width, seen_width
from serving.backends.torch_sampling import draw, drawable
from serving.backends.torch_settings import check_config, check_memory, check_options, chosen_format, compute_bytes, device_of
from serving.backends.torch_weights import compute_dtype, cpu_has_bf16, load, predicted_bytes, stored_format
from serving.errors import EngineFailed, OutOfMemory
from serving.sampling import sample

CAN = frozenset(CAPABILITIES)


class TorchBackend:
    """See serving.backends.base. Raises Unsupported (options), OutOfMemory, BrokenWeights, UnsupportedModel, BackendUnavailable."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None:
        options = check_options(config.options, config.device)
        folder = Path(config.model_path)
        self._device = device_of(config.device)
        spec = read_spec(folder, config.model_name)
        check_config(config, spec)
        manifest = read_manifest(folder)
        if manifest is not None:
            verify(folder, manifest, progress=progress)
        weight_format = chosen_format(config.weight_format, stored_format(folder), self._device)
        dtype = compute_dtype(weight_format, self._device)
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        slots, context = config.slots, config.context_tokens
        kv_bytes = slots * cache_width(context) * spec.kv_bytes_per_token("bf16") * dtype.itemsize // 2
        predicted = MemoryParts(predicted_bytes(spec, weight_format), kv_bytes, compute_bytes(spec, slots, options["prefill_chunk"]))
        check_memory(predicted, self._device, options["margin"])
        self._spec, self._chunk, self._device_sampling = spec, options["prefill_chunk"], options["device_sampling"]
        with _memory_errors("loading the weights"), torch.inference_mode():
            weights = load(folder, spec, weight_format, self._device, progress)
            self._model: SlotModel | None = SlotModel(spec, weights, slots, context, dtype, self._device)
            graphed = self._device.type != "cpu"
            self._graphs = DecodeGraphs(self._model, slots, capture=options["graphs"], progress=progress) if graphed else None
        price = 0.0  # on a GPU a row more in a bucket costs next to nothing
        if self._device.type == "cpu":
            price = rider_tokens(spec.flops_per_token(), threads, kv_bytes / slots / cache_width(context))
        # A full row has one more column for a dummy token (cache_width), so every row can ride along.
        self._rows = RowMap(slots, context + 1, price)
        self._columns = torch.arange(self._model.width, device=self._device)
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
            slots=slots,
            context_tokens=context,
            kv_tokens=min(config.kv_tokens or slots * context, slots * context),
            vocabulary=spec.vocabulary,
            weight_format=weight_format,
            step_tokens=max(512, 2 * slots, options["prefill_chunk"]),
            predicted=predicted,
            measured=MemoryParts(weights.bytes, self._model.kv_bytes, self._reserved(weights.bytes + self._model.kv_bytes)),
            capabilities=CAN,
            details=self._details(options, threads, dtype, weight_format),
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        """See serving.backends.base.Backend.step."""
        if self._model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            self._check(row)
        with _memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(self._model, rows)
            drawn = dict(zip([row.slot for row in wanted], self._draw(logits, wanted), strict=True))
        return [drawn[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See serving.backends.base.Backend.copy."""
        a, b = self._rows.row_of[source], self._rows.row_of[target]
        if tokens > self._rows.length[a]:
            raise EngineFailed(f"slot {source} holds {self._rows.length[a]} tokens, {tokens} were to be copied")
        if a != b and self._model is not None:
            self._model.copy(a, b, tokens)
        self._rows.length[b] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        """See serving.backends.base.Backend.truncate."""
        row = self._rows.row_of[slot]
        self._rows.length[row] = min(tokens, self._rows.length[row])

    def close(self) -> None:
        """See serving.backends.base.Backend.close."""
        self._model, self._graphs = None, None
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
        return self._run_mixed(model, decoding, filling)

    def _run_graph(self, graphs: DecodeGraphs, model: SlotModel, rows: list[Row]) -> tuple[Tensor, list[Row]]:
        places = [self._rows.row_of[row.slot] for row in rows]
        small = bucket_of(len(rows), graphs.batches)
        if bucket_of(max(places) + 1, graphs.batches) > small:
            # One copy of a row's KV against reading all weights' activations for a bigger batch at every step to come.
            free = [place for place in range(small) if place not in places]
            for place in sorted(place for place in places if place >= small):
                self._swap(model, place, free.pop())
            places = [self._rows.row_of[row.slot] for row in rows]
        batch = bucket_of(max(places) + 1, graphs.batches)
        ids, positions = _host([0] * batch, self._device), _host(self._rows.length[:batch], self._device)
        for row, place in zip(rows, places, strict=True):
            ids[place] = int(row.tokens[0])
        logits = graphs.run(ids, positions, max(self._rows.length[place] for place in places) + 1)
        for place in places:
            self._rows.length[place] += 1
        wanted = [(row, place) for row, place in zip(rows, places, strict=True) if row.wants_token]
        at = torch.tensor([place for _, place in wanted], dtype=torch.int64, device=self._device)
        return logits.index_select(0, at), [row for row, _ in wanted]

    def _run_mixed(self, model: SlotModel, decoding: list[Row], filling: list[Row]) -> tuple[Tensor, list[Row]]:
        """One eager pass over everything; prompts longer than the chunk take passes of their own before it."""
        for row in filling:
            self._run_ahead(model, row)
        ids: list[Any] = []
        positions: list[Any] = []
        spans: list[DecodeSpan | PromptSpan] = []
        wanted: list[Row] = []
        at: list[int] = []
        count = 0
        if decoding:
            window = self._rows.window([row.slot for row in decoding])
            for a, b in window.swaps:
                self._swap(model, a, b)
            count = self._add_decode(model, window, decoding, ids, positions, spans, wanted, at)
        for row in filling:
            start, tokens = self._ahead(row)
            place = self._rows.row_of[row.slot]
            spans.append(self._prompt_span(model, count, len(tokens), place, start))
            ids.append(tokens.astype(np.int64))
            positions.append(np.arange(start, start + len(tokens)))
            count += len(tokens)
            self._rows.length[place] = start + len(tokens)
            if row.wants_token:
                wanted.append(row)
                at.append(count - 1)
        device = self._device
        everything = torch.from_numpy(np.concatenate(ids)).to(device), torch.from_numpy(np.concatenate(positions)).to(device)
        chosen = None if len(at) == count else torch.tensor(at, dtype=torch.int64, device=device)
        return model.forward(*everything, spans, chosen), wanted

    def _add_decode(
        self,
        model: SlotModel,
        window: Window,
        rows: list[Row],
        ids: list[Any],
        positions: list[Any],
        spans: list[DecodeSpan | PromptSpan],
        wanted: list[Row],
        at: list[int],
    ) -> int:
        """The decode rows' part of a mixed pass; returns how many tokens it has, riders included."""
        count = window.hi - window.lo
        length = np.array(self._rows.length[window.lo : window.hi], np.int64)
        tokens = np.zeros(count, np.int64)
        for row in sorted(rows, key=lambda row: self._rows.row_of[row.slot]):
            place = self._rows.row_of[row.slot]
            tokens[place - window.lo] = row.tokens[0]
            self._rows.length[place] += 1
            if row.wants_token:
                wanted.append(row)
                at.append(place - window.lo)
        width = seen_width(int(length.max()) + 1, model.width)
        allowed = self._columns[None, :width] <= torch.from_numpy(length).to(self._device)[:, None]
        spans.append(DecodeSpan(0, window.lo, window.hi, additive_mask(allowed, model.dtype)[:, None, None], self._columns[:count]))
        ids.append(tokens)
        positions.append(length)
        return count

    def _prompt_span(self, model: SlotModel, first: int, count: int, place: int, start: int) -> PromptSpan:
        mask = None
        if start:
            allowed = self._columns[None, : start + count] <= self._columns[start : start + count, None]
            mask = additive_mask(allowed, model.dtype)
        return PromptSpan(first, count, place, start, mask)

    def _ahead(self, row: Row) -> tuple[int, Any]:
        """Where the last chunk of a prompt row starts, and its tokens."""
        done = (len(row.tokens) - 1) // self._chunk * self._chunk
        return row.start + done, row.tokens[done:]

    def _run_ahead(self, model: SlotModel, row: Row) -> None:
        place = self._rows.row_of[row.slot]
        last, _ = self._ahead(row)
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        for start in range(row.start, last, self._chunk):
            tokens = row.tokens[start - row.start : start - row.start + self._chunk].astype(np.int64)
            span = self._prompt_span(model, 0, len(tokens), place, start)
            model.forward(torch.from_numpy(tokens).to(self._device), self._columns[start : start + len(tokens)], [span], none)
            self._rows.length[place] = start + len(tokens)

    def _draw(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        if not rows:
            return []
        if not self._device_sampling:
            return sample(logits.cpu().numpy(), rows)
        here = [index for index, row in enumerate(rows) if drawable(row)]
        out: dict[int, Sampled] = {}
        if here:
            subset = logits if len(here) == len(rows) else logits[torch.tensor(here, device=self._device)]
            tokens, good = draw(subset, [rows[index] for index in here])
            both = torch.stack((tokens, good.long())).cpu().tolist()  # one copy to the host, which waits for the step
            out = {index: Sampled(token) for index, token, fine in zip(here, *both, strict=True) if fine}
        rest = [index for index in range(len(rows)) if index not in out]
        if rest:
            values = logits[torch.tensor(rest, device=self._device)].cpu().numpy()
            out.update(zip(rest, sample(values, [rows[index] for index in rest]), strict=True))
        return [out[index] for index in range(len(rows))]

    def _swap(self, model: SlotModel, a: int, b: int) -> None:
        model.swap(a, b, self._rows.length[a], self._rows.length[b])
        self._rows.swap(a, b)

    def _check(self, row: Row) -> None:
        held = self._rows.length[self._rows.row_of[row.slot]]
        if row.start > held or row.start + len(row.tokens) > self.info.context_tokens:
            raise EngineFailed(
                f"slot {row.slot} holds {held} of {self.info.context_tokens} tokens; "
                f"a row of {len(row.tokens)} tokens cannot start at {row.start}"
            )

    def _reserved(self, accounted: int) -> int | None:
        """Device memory that torch holds beyond weights and KV: graph pool and workspaces."""
        return max(0, torch.cuda.memory_reserved(self._device) - accounted) if self._device.type == "cuda" else None

    def _details(self, options: dict[str, Any], threads: int, dtype: torch.dtype, weight_format: str) -> dict[str, str]:
        details = {
            "torch": str(torch.__version__),  # a class of its own, which no message can carry
            "compute_dtype": str(dtype).removeprefix("torch."),
            "kv_dtype": str(dtype).removeprefix("torch."),
        }
        if self._device.type == "cuda":
            details["graphs"] = str(options["graphs"]).lower()
            details["device_sampling"] = str(options["device_sampling"]).lower()
            details["runtime"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        else:
            details["threads"] = str(threads)
            details["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
            if not cpu_has_bf16() and weight_format == "bf16":
                details["bf16"] = "no arithmetic on this CPU: weights are widened block by block, activations and KV cache are float32"
        return details


class _memory_errors:
    """Turns torch's out-of-memory errors into OutOfMemory, and errors of a lost device into EngineFailed."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if problem is None or not isinstance(problem, RuntimeError | MemoryError):
            return
        text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        if isinstance(problem, torch.OutOfMemoryError | MemoryError) or "not enough memory" in text or "out of memory" in text:
            raise OutOfMemory(f"{self._what} did not fit in memory: {text}") from problem
        raise EngineFailed(f"torch failed in {self._what}: {text}") from problem


def _host(values: list[int], device: torch.device) -> Tensor:
    """int64 on the host, page-locked where a GPU will copy it."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
