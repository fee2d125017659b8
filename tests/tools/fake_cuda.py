"""A stand-in for torch.cuda's graph API, on the CPU. Not a GPU.

    with FakeCuda().installed(monkeypatch): ...

A captured graph is the list of aten calls of its body; a replay computes them again into the same
storage, as a CUDA graph does. What a capture leaves alive stays in the pool, what it frees is used
again by the next: a graph's `peak_bytes` is the most that was alive at once. The flash kernel is a
plain computation of what torch's own one is documented to do, with its checks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Alive(TorchDispatchMode):
    """Bytes of the tensors made under it that somebody still holds: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._holders: dict[int, int] = {}  # of a storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.see(out, args, kwargs)
        return out

    def see(self, out: Any, args: Any, kwargs: Any) -> None:
        given = {_storage(one) for one in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            key, size = _storage(tensor), tensor.untyped_storage().nbytes()
            if key not in self._holders:
                if key in given:
                    continue  # a view of something that was there before
                self._holders[key] = 0
                self.now += size
                self.peak = max(self.peak, self.now)
            self._holders[key] += 1
            weakref.finalize(tensor, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= size


class Recorded(TorchDispatchMode):
    """The calls of a capture. Their tensors are kept as aliases, so that `alive` sees who holds
    them beside the graph."""

    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self._alive = alive
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        self._alive.see(out, args, kwargs)
        self.calls.append((func, *(_aliased(one) for one in (args, kwargs, out))))
        return out


class FakeGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.peak_bytes = 0
        self._pool: Any = None

    def pool(self) -> Any:
        return self._pool

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if _storage(old) != _storage(new):
                    old.copy_(new)


class FakeStream:
    """torch.cuda.Stream."""

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, FakeStream)


class FakeCuda:
    """One made-up device."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.graphs: list[FakeGraph] = []
        self.capture_streams: list[Any] = []
        self.synchronised = 0
        self.emptied = 0
        self.refuses_capture: str | None = None
        self._pool = Alive()
        self._now = FakeStream()

    @property
    def kept_bytes(self) -> int:
        """What captures have left alive."""
        return self._pool.now

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def synchronize(self, device: Any = None) -> None:
        self.synchronised += 1

    def empty_cache(self) -> None:
        self.emptied += 1

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        if self.refuses_capture is not None:
            raise RuntimeError(self.refuses_capture)
        assert pool in (None, self)
        self.capture_streams.append(stream)
        graph._pool = self
        self._pool.peak = self._pool.now
        with Recorded(self._pool) as recorded:
            yield
        graph.calls = recorded.calls
        graph.peak_bytes = self._pool.peak
        self.graphs.append(graph)

    @contextlib.contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        yield

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        """Put it in torch.cuda's place, and make device gpu the CPU."""
        for name, stand_in in {
            "Stream": self.stream,
            "stream": self._on,
            "current_stream": lambda: self._now,
            "CUDAGraph": FakeGraph,
            "graph": self.graph,
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "get_device_name": lambda device=None: "a stand-in",
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        where = "crossover.serving.backends.torch"
        patch.setattr(f"{where}.backend.torch_device_of", lambda name: torch.device("cpu"))
        return self


def install_flash(patch: pytest.MonkeyPatch) -> None:
    """The flash kernel's stand-in, and attention that takes it on the CPU, in any type."""
    where = "crossover.serving.backends.torch"
    patch.setattr(f"{where}.varlen_attention.flash_kernel", lambda: torch.ops.crossover_test.flash)
    patch.setattr(f"{where}.backend.why_no_flash", lambda spec, dtype, device: None)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """aten._flash_attention_forward, its form for sequences of different length.

    flash_api.cpp's checks; block_info.h: the keys of sequence b begin at starts_k[b] and are
    seqused_k[b]; mask.h: causal is aligned at the last key; a sequence without keys is zeros.
    """
    count = len(starts_q) - 1
    assert seqused_k is not None and scale is not None
    assert not debug and dropout == 0.0
    for one in (starts_q, starts_k, seqused_k):
        assert one.dtype == torch.int32 and one.is_contiguous()
    assert len(starts_k) == count + 1 and len(seqused_k) == count
    assert query.dim() == key.dim() == value.dim() == 3 and key.shape == value.shape
    assert all(one.stride(-1) == 1 for one in (query, key, value))
    assert query.shape[2] == key.shape[2] and query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0 and int(starts_q[-1]) == len(query)
    assert most_q > 1 or count == len(query), (
        "with groups of heads as queries, one token a sequence"
    )
    shared = query.shape[1] // key.shape[1]
    out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    sums = torch.zeros(query.shape[1], len(query))
    for index in range(count):
        first, last = int(starts_q[index]), int(starts_q[index + 1])
        begin, cached = int(starts_k[index]), int(seqused_k[index])
        assert last - first <= most_q and cached <= most_k and begin + cached <= len(key)
        keys = key[begin : begin + cached].float().repeat_interleave(shared, 1)
        values = value[begin : begin + cached].float().repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys) * scale
        if causal:
            offset = cached - (last - first)
            allowed = torch.ones(last - first, cached, dtype=torch.bool).tril(offset)
            scores = scores.masked_fill(~allowed, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)  # without keys: zeros
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out, sums


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _aliased(values: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.detach(), values)


_LIBRARY = torch.library.Library("crossover_test", "DEF")
_LIBRARY.define(
    "flash(Tensor query, Tensor key, Tensor value, Tensor starts_q, Tensor starts_k, SymInt most_q,"
    " SymInt most_k, float dropout, bool causal, bool debug, *, float? scale=None,"
    " Tensor? seqused_k=None) -> (Tensor, Tensor)"
)
_LIBRARY.impl("flash", flash, "CPU")
