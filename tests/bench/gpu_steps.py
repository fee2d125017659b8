"""What a step of the torch engine costs on a GPU: decode rows by the way they draw, steps with
pieces of prompts, a burst of requests; its load and its memory; and whether its tokens are right.

    python -m tests.bench.gpu_steps --models 1b 8b --json steps.json
    python -m tests.bench.gpu_steps --before /path/of/another/checkout --models 1b
    python -m tests.bench.gpu_steps --device cpu --models 135m --quick     # the rehearsal

Each model and checkout runs in a process of its own, one after the other on the same device, so
that a change is compared within one call. Times are medians of a step with everything read, or of
a chain of launched steps divided by their number. The tokens' check (of this checkout, the first
model) runs prompts of 1 to 700 tokens in pieces beside decoding rows and through launched steps,
and compares with transformers in float32; it compares drawn tokens with the host's, and captured
steps with launched kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
CONTEXT = 256  # tokens that a decoding row holds
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["1b", "8b"])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--before", type=Path, help="another checkout, measured beside this one")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="few rows and steps")
    parser.add_argument("--no-check", action="store_true", help="times only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        Child(options, options.child).run()
        return
    found: list[dict[str, Any]] = []
    for index, model in enumerate(options.models):
        for name, folder in (("before", options.before), ("after", ROOT)):
            if folder is None:
                continue
            is_checked = name == "after" and index == 0 and not options.no_check
            facts = run_child(options, model, folder, is_checked)
            found.append({"code": name, "model": model} | facts)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1))
    print_table(found)


def run_child(
    options: argparse.Namespace, model: str, folder: Path, is_checked: bool
) -> dict[str, Any]:
    """Every figure of one model by the code of a checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device]
    command += ["--slots", str(options.slots), "--child", model]
    command += ["--quick"] * options.quick + ["--no-check"] * (not is_checked)
    started = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, check=False
    )
    facts: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
        else:
            print(line, flush=True)
    if done.returncode != 0:
        facts["failed"] = done.returncode
    print(f"{folder.name} {model}: {json.dumps(facts)[:700]}", flush=True)
    return facts


def print_table(found: list[dict[str, Any]]) -> None:
    """Each figure by model and code."""
    columns = [f"{one['model']} {one['code']}" for one in found]
    names = dict.fromkeys(name for one in found for name in one if name not in ("code", "model"))
    print(f"{'':44}" + "".join(f"{column:>14}" for column in columns))
    for name in names:
        values = [one.get(name) for one in found]
        if all(isinstance(value, int | float | None) for value in values):
            line = "".join(f"{'-' if value is None else f'{value:.5g}':>14}" for value in values)
            print(f"{name:44}{line}")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Child:
    """One model on one checkout."""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        self.options = options
        self.model = model
        self.is_gpu = options.device == "gpu"
        started = time.perf_counter()
        import torch

        self.torch = torch
        used = self.used_bytes()  # makes CUDA's context
        say(import_and_cuda_s=round(time.perf_counter() - started, 2))
        from crossover.models.identity.resolve_model import resolve
        from crossover.models.shape.hf_config import read_spec
        from crossover.serving.backends.backend_interface import EngineConfig
        from crossover.serving.backends.torch import memory_overhead
        from crossover.serving.backends.torch.backend import TorchBackend

        started = time.perf_counter()
        self.found = resolve(model, kind="hf", weight_format="bf16")
        say(weights_made_s=round(time.perf_counter() - started, 2))
        self.spec = spec = read_spec(Path(self.found.path), self.found.name)
        settings = {"slots": options.slots, "context_tokens": 1024}
        more: dict[str, Any] = dict(settings)
        if "settings" in EngineConfig.__struct_fields__:
            from crossover.serving.capacity.scheduler_settings import SchedulerSettings

            more = {"settings": SchedulerSettings(step_tokens=2048, **settings)}
        config = EngineConfig(
            backend="torch",
            model_path=self.found.path,
            model_name=self.found.name,
            weight_format="bf16",
            tokenizer_path=self.found.tokenizer_path,
            device=options.device,
            threads=4,
            **more,
        )
        self.config = config
        stages: list[tuple[float, str]] = []
        started = time.perf_counter()
        self.backend: Any = TorchBackend(
            config, lambda what, _: stages.append((time.perf_counter(), what.split()[0]))
        )
        self.synchronize()
        ended = time.perf_counter()
        seconds: dict[str, float] = {}
        for (begun, what), (until, _) in zip(stages, [*stages[1:], (ended, "")], strict=True):
            seconds[what] = round(seconds.get(what, 0.0) + until - begun, 2)
        weights = 2 * sum(int(np.prod(tensor.shape)) for tensor in spec.tensors())
        kv = options.slots * 1024 * spec.kv_bytes_per_token("bf16")
        sized = getattr(config, "settings", options.slots)
        overhead = memory_overhead.overhead_bytes(spec, "bf16", sized)
        say(
            load_s=round(ended - started, 2),
            **{f"load: {what} s": value for what, value in seconds.items()},
            details=self.backend.info.details,
            held_before_MiB=used // MIB,
            held_after_load_MiB=self.used_bytes() // MIB,
            predicted_MiB=(weights + kv + int(0.01 * weights) + overhead) // MIB,
            predicted_overhead_MiB=overhead // MIB,
        )
        self.random = np.random.default_rng(0)

    def synchronize(self) -> None:
        if self.is_gpu:
            self.torch.cuda.synchronize()

    def used_bytes(self) -> int:
        if not self.is_gpu:
            return 0
        self.torch.cuda.init()  # type: ignore[no-untyped-call]
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free)

    def ids(self, count: int) -> Any:
        return self.random.integers(3, self.spec.vocabulary, count).astype(np.int32)

    def median_ms(self, function: Callable[[], object], rounds: int) -> float:
        """Milliseconds of a call with the device's work done; the first is not counted."""
        seconds = []
        for index in range(rounds + 1):
            self.synchronize()
            started = time.perf_counter()
            function()
            self.synchronize()
            if index:
                seconds.append(time.perf_counter() - started)
        return round(statistics.median(seconds) * 1e3, 3)

    def run(self) -> None:
        quick = self.options.quick
        if not self.options.no_check:
            self.check()
        slots = self.options.slots
        for slot in range(slots):
            count = CONTEXT if not quick else 8
            self.backend.step([self.row(slot, count, 0)])
        self.steps_with_prompts((0, 2) if quick else (0, 8, 64), 2 if quick else 7)
        for rows in (1, 2) if quick else (1, 32, 128):
            self.decode(rows, 3 if quick else 40)
        self.bursts(4 if quick else 64)
        say(held_at_end_MiB=self.used_bytes() // MIB)
        if self.is_gpu and not quick:
            self.profile()

    def row(self, slot: int, tokens: int, start: int, sampling: Any = None) -> Any:
        from crossover.serving.sampling.step_inputs import Row, Sampling

        return Row(slot, self.ids(tokens), start, True, sampling or Sampling())

    def cached(self) -> int:
        return 8 if self.options.quick else CONTEXT

    def steps_with_prompts(self, decoding: tuple[int, ...], rounds: int) -> None:
        """Milliseconds of a step by decode rows and prompt tokens, in pieces of at most 256."""
        prompts = (16, 40) if self.options.quick else (16, 64, 128, 256, 512, 1024)
        for rows in decoding:
            for tokens in prompts:
                pieces = [min(256, tokens - at) for at in range(0, tokens, 256)]
                step = [self.row(slot, 1, self.cached()) for slot in range(rows)]
                step += [self.row(rows + at, count, 0) for at, count in enumerate(pieces)]
                milliseconds = self.median_ms(partial(self.backend.step, step), rounds)
                say(**{f"{rows} rows + {tokens} prompt tokens ms": milliseconds})
            for slot in range(rows, rows + 4):
                self.backend.step([self.row(slot, self.cached(), 0)])

    def decode(self, rows: int, steps: int) -> None:
        """Milliseconds of a decode step by how tokens are drawn: launched, on the CPU stepped."""
        from crossover.serving.sampling.step_inputs import Sampling

        kinds = {
            "greedy": Sampling(),
            "temperature": Sampling(temperature=0.8, seed=1),
            "top-p": Sampling(temperature=0.8, top_p=0.95, seed=1),
            "top-k": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1),
        }
        for name, sampling in kinds.items():
            best = []
            for _ in range(1 if self.options.quick else 3):
                self.chain(rows, sampling, 4)
                self.synchronize()
                started = time.perf_counter()
                self.chain(rows, sampling, steps)
                self.synchronize()
                best.append((time.perf_counter() - started) / steps * 1e3)
            say(**{f"{rows} rows {name} ms": round(statistics.median(best), 3)})

    def chain(self, rows: int, sampling: Any, steps: int) -> None:
        from crossover.serving.sampling.step_inputs import PLACEHOLDER, Row

        cached, after = self.cached(), None
        for slot in range(rows):
            self.backend.truncate(slot, cached)
        for step in range(steps):
            token = np.array([PLACEHOLDER if after is not None else 5], np.int32)
            batch = [Row(slot, token, cached + step, True, sampling) for slot in range(rows)]
            if not self.is_gpu:
                batch = [
                    Row(slot, np.array([5], np.int32), cached + step, True, sampling)
                    for slot in range(rows)
                ]
                self.backend.step(batch)
                continue
            launched = self.backend.launch(batch, after)
            assert launched is not None
            if after is not None:
                after.tokens()
            after = launched
        if after is not None:
            after.tokens()

    def bursts(self, requests: int) -> None:
        """A burst through the scheduler: seconds, tokens a second, milliseconds between tokens
        while prompts are read and after."""
        from crossover.serving.engine.ipc_messages import GenerationRequest, Submit
        from crossover.serving.engine.scheduler import Scheduler
        from crossover.serving.sampling.step_inputs import Sampling

        tokens, answer = (12, 4) if self.options.quick else (256, 64)
        table = [b"x"] * self.backend.info.vocabulary
        import msgspec

        for most in (256, 2048):
            config, info = self.config, self.backend.info
            if "settings" in type(config).__struct_fields__:
                inner = msgspec.structs.replace(info.settings, prefill_tokens=most)
                self.backend.info = msgspec.structs.replace(info, settings=inner)
            else:
                config = msgspec.structs.replace(config, prefill_tokens=most)
            for temperature in (0.0, 0.8):
                scheduler = Scheduler(self.backend, table, frozenset(), config)
                prompts = [self.ids(tokens).tolist() for _ in range(requests)]
                started = time.perf_counter()
                for number, prompt in enumerate(prompts):
                    sampling = Sampling(temperature=temperature, seed=number)
                    request = GenerationRequest(prompt, answer, sampling, ignore_eos=True)
                    assert scheduler.add(Submit(number, request)) is None
                mixed: list[float] = []
                decode_only: list[float] = []
                while scheduler.busy:
                    before = time.perf_counter()
                    scheduler.step()
                    stats = scheduler.stats()
                    took = (time.perf_counter() - before) * 1e3
                    (mixed if stats.prefill_tokens else decode_only).append(took)
                seconds = time.perf_counter() - started
                name = f"burst {requests}, {most} a step, T {temperature}"
                say(
                    **{
                        f"{name}: s": round(seconds, 3),
                        f"{name}: mixed ms": round(statistics.median(mixed), 2),
                        f"{name}: decode ms": round(statistics.median(decode_only), 2),
                    }
                )

    def profile(self) -> None:
        """Kernels of a decode step of one row, by their time."""
        from torch.profiler import ProfilerActivity, profile

        from crossover.serving.sampling.step_inputs import Sampling

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.chain(1, Sampling(), 8)
            self.synchronize()
        averages = profiled.key_averages()
        lines = sorted(
            (
                (one.self_device_time_total / 8, one.count // 8, one.key[:70])
                for one in averages
                if one.self_device_time_total
            ),
            reverse=True,
        )
        say(kernels_of_one_row=[[round(us, 1), count, name] for us, count, name in lines[:16]])

    def check(self) -> None:
        """Whether tokens are right, see the module's docstring."""
        self.check_draws()
        if self.is_gpu:
            self.check_graphs()
        self.check_tokens()
        for slot in range(self.options.slots):
            self.backend.truncate(slot, 0)

    def check_draws(self) -> None:
        """The share of rows whose tokens the device draws as the host does, of logits as the model
        gives them (bf16, with ties) and of peaked ones; and the share left to the host."""
        from crossover.serving.backends.torch.gpu_sampler import DeviceSampler
        from crossover.serving.sampling.batch_sampler import sample
        from crossover.serving.sampling.step_inputs import Row, Sampling

        torch = self.torch
        rows = min(self.options.slots, 128)
        kinds = {
            "greedy": Sampling(),
            "temperature": Sampling(temperature=0.8),
            "top-p": Sampling(temperature=0.8, top_p=0.95),
            "top-k": Sampling(temperature=0.8, top_k=50, top_p=0.95),
            "long top-k": Sampling(temperature=1.2, top_k=500),
        }
        import msgspec

        buffer: Any = self.backend._logits if self.is_gpu else None
        sampler = self.backend._sampler if self.is_gpu else DeviceSampler(torch.device("cpu"))
        for name, sampling in kinds.items():
            shares = []
            for spread in (1.0, 6.0):
                numbers = self.random.normal(0, spread, (rows, self.spec.vocabulary))
                logits = torch.tensor(numbers, dtype=torch.bfloat16).float()
                sampled_rows = [
                    Row(
                        at, self.ids(1), 7 * at, True, msgspec.structs.replace(sampling, seed=at**3)
                    )
                    for at in range(rows)
                ]
                there = logits
                with torch.inference_mode():
                    if self.is_gpu:
                        buffer[:rows].copy_(logits)
                        there = buffer[:rows]
                    tokens, good = sampler.draw(there, sampled_rows)
                device, fine = tokens.tolist(), good.tolist()
                host = [one.token for one in sample(logits.numpy(), sampled_rows)]
                same = [a == b for a, b, is_good in zip(device, host, fine, strict=True) if is_good]
                share = round(sum(same) / len(same), 3) if same else "none"
                shares.append(f"{share} of {sum(fine)}")
            say(**{f"draws as the host, {name} (flat, peaked)": shares})

    def check_graphs(self) -> None:
        """The largest difference of a captured step's logits from those of launched kernels, for
        random steps."""
        torch, backend = self.torch, self.backend
        from crossover.serving.backends.torch.forward_pass import run_pass

        worst, agreed, compared, captured = 0.0, 0, 0, 0
        slots = self.options.slots
        for round_ in range(24):
            singles = int(self.random.integers(0, min(slots - 8, 100)))
            pieces = [int(n) for n in self.random.integers(2, 90, self.random.integers(0, 9))]
            if not singles and not pieces:
                continue
            for slot in range(singles):
                if round_ == 0 or backend._lengths[slot] < 20:
                    backend.step([self.row(slot, int(self.random.integers(1, 300)), 0)])
            rows = [self.row(slot, 1, backend._lengths[slot]) for slot in range(singles)]
            rows += [self.row(slots - 1 - at, count, 0) for at, count in enumerate(pieces)]
            with torch.inference_mode():
                result = backend._graphs.run(rows, None)
                if result is None:
                    continue
                captured += 1
                mine = result[0].clone()
                out = torch.empty_like(backend._logits)
                eager, _ = run_pass(backend._model, rows, out)
            worst = max(worst, float((mine - eager).abs().max()))
            agreed += int((mine.argmax(-1) == eager.argmax(-1)).sum())
            compared += len(mine)
        for slot in range(slots):
            backend.truncate(slot, 0)
        say(
            graphs_compared=captured,
            graphs_worst_logit_difference=round(worst, 4),
            graphs_same_argmax=round(agreed / max(1, compared), 4),
        )

    def check_tokens(self) -> None:
        """The share of greedy tokens that transformers in float32 would choose, of ours and of its
        own bf16."""
        from crossover.serving.sampling.step_inputs import PLACEHOLDER, Row

        torch, backend, quick = self.torch, self.backend, self.options.quick
        lengths = [1, 2, 3, 17, 64, 65, 127, 128, 200, 255, 256, 257, 300, 400, 511, 700]
        if quick:
            lengths = [1, 2, 3, 17, 40, 65]
        rng = np.random.default_rng(7)
        prompts = [rng.integers(3, self.spec.vocabulary, n).astype(np.int32) for n in lengths]
        sequences = [list(map(int, prompt)) for prompt in prompts]
        cached = [0] * len(prompts)
        first, late = range(0, len(prompts), 2), range(1, len(prompts), 2)
        drawn = backend.step([Row(slot, prompts[slot], 0, True) for slot in first])
        for slot, one in zip(first, drawn, strict=True):
            cached[slot] = len(prompts[slot])
            sequences[slot].append(one.token)
        after: Any = None
        for _ in range(8 if quick else 40):
            rows = []
            for slot in range(len(prompts)):
                left = len(prompts[slot]) - cached[slot]
                if slot in late and left > 0:
                    count = min(100, left)
                    piece = prompts[slot][cached[slot] : cached[slot] + count]
                    rows.append(Row(slot, piece, cached[slot], count == left))
                elif self.is_gpu and after is not None and slot in after[1]:
                    rows.append(Row(slot, np.array([PLACEHOLDER], np.int32), cached[slot], True))
                else:
                    token = np.array(sequences[slot][-1:], np.int32)
                    rows.append(Row(slot, token, cached[slot], True))
            wanting = [row.slot for row in rows if row.wants_token]
            if self.is_gpu:
                launched = backend.launch(rows, None if after is None else after[0])
                assert launched is not None
                if after is not None:
                    for slot, one in zip(after[1], after[0].tokens(), strict=True):
                        sequences[slot].append(one.token)
                after = launched, wanting
            else:
                for slot, one in zip(wanting, backend.step(rows), strict=True):
                    sequences[slot].append(one.token)
            for row in rows:
                cached[row.slot] = row.position
        if after is not None:
            for slot, one in zip(after[1], after[0].tokens(), strict=True):
                sequences[slot].append(one.token)
        from transformers import AutoModelForCausalLM

        chosen: dict[str, list[int]] = {}
        for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
            model = AutoModelForCausalLM.from_pretrained(
                self.found.path, dtype=dtype, attn_implementation="sdpa"
            )
            model = model.to("cuda" if self.is_gpu else "cpu").eval()
            chosen[name] = []
            with torch.inference_mode():
                for prompt, sequence in zip(prompts, sequences, strict=True):
                    ids = torch.tensor([sequence[:-1]], device=model.device)
                    logits = model(ids).logits[0, len(prompt) - 1 :]
                    chosen[name] += logits.argmax(-1).tolist()
            del model
        ours = [
            token
            for prompt, sequence in zip(prompts, sequences, strict=True)
            for token in sequence[len(prompt) :]
        ]
        pairs = {"ours": ours, "transformers bf16": chosen["bf16"]}
        for name, tokens in pairs.items():
            same = [a == b for a, b in zip(tokens, chosen["float32"], strict=True)]
            say(**{f"tokens of float32, {name}": round(sum(same) / len(same), 4)})
        if self.is_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
