"""What a step costs beside the model: scheduler, batch rows, sampling over a big vocabulary, text,
and the message to the parent.

    python -m tests.bench.host_work [--streams 32] [--vocabulary 152064] [--steps 300]
    python -m tests.bench.host_work --streams 16 --gguf MODEL.gguf

The engine's own loop runs in this process on a backend that computes nothing: its logits are ready
before the step starts, so all the time that is counted is the host's. The logits are random, or
with --gguf those of a model after each token of the README, other ones in each step. Prints one
table; the sampler is the CPU backends' own.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from crossover.serving.backends.backend_interface import BackendInfo, EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.engine.ipc_messages import GenerationRequest, Step, Submit, frame
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import Logits, Row, Sampled, Sampling
from tests.bench.paired import parser_of

README = Path(__file__).parents[2] / "README.md"
README_TOKENS = 400


class ReadyLogits:
    """A backend whose logits were computed yesterday: `logits`, float32 [n, vocabulary], n at least
    the number of slots."""

    def __init__(self, slots: int, logits: Logits) -> None:
        self.info = BackendInfo(
            name="ready",
            device="cpu",
            device_name="",
            settings=SchedulerSettings(
                slots=slots, context_tokens=4096, kv_tokens=4096 * slots, step_tokens=2048
            ),
            vocabulary=logits.shape[1],
            weight_format="none",
        )
        self._logits = logits
        self._first = 0

    def step(self, rows: list[Row]) -> list[Sampled]:
        wanting = [row for row in rows if row.wants_token]
        if not wanting:
            return []
        if self._first + len(wanting) > len(self._logits):
            self._first = 0
        first, self._first = self._first, self._first + len(wanting)
        return sample(self._logits[first : self._first], wanting)

    def copy(self, source: int, target: int, tokens: int) -> None: ...

    def truncate(self, slot: int, tokens: int) -> None: ...

    def close(self) -> None: ...


def random_logits(rows: int, vocabulary: int) -> Logits:
    return np.random.default_rng(1).standard_normal((rows, vocabulary)).astype(np.float32)


def logits_of_readme(gguf: Path) -> Logits:
    """Return the model's logits after each of the README's first tokens, in shuffled order."""
    from llama_cpp import Llama

    model = Llama(str(gguf), n_ctx=README_TOKENS, logits_all=True, verbose=False)
    model.eval(model.tokenize(README.read_bytes())[:README_TOKENS])
    return np.random.default_rng(1).permutation(np.array(model.scores, np.float32))


def measure(
    streams: int, logits: Logits, steps: int, sampling: Sampling, stop: list[str]
) -> tuple[float, float]:
    """Median and 99th percentile of one step's host time, in seconds."""
    backend = ReadyLogits(streams, logits)
    config = EngineConfig(
        backend="ready",
        model_path="",
        model_name="ready",
        settings=SchedulerSettings(slots=streams, context_tokens=4096),
    )
    table = [f" w{i}".encode() for i in range(logits.shape[1])]
    scheduler = Scheduler(backend, table, frozenset(), config)
    for number in range(streams):
        scheduler.add(Submit(number, GenerationRequest([3 + number] * 8, 4000, sampling, stop)))
    for _ in range(20):
        scheduler.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        frame(Step(scheduler.step(), scheduler.stats()))
        times.append(time.perf_counter() - started)
    return statistics.median(times), float(np.percentile(times, 99))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gguf", type=Path, help="a model, in place of random logits")
    options = parser.parse_args()
    if options.gguf is None:
        logits = random_logits(options.streams, options.vocabulary)
    else:
        logits = logits_of_readme(options.gguf)
    cases = {
        "greedy": (Sampling(), []),
        "greedy, 4 stop strings": (Sampling(), ["STOP", "\n\n", "User:", "</s>"]),
        "temperature 0.8": (Sampling(temperature=0.8, seed=3), []),
        "temperature 0.8, top-k 50": (Sampling(temperature=0.8, top_k=50, seed=3), []),
        "temperature 0.8, min-p 0.05": (Sampling(temperature=0.8, min_p=0.05, seed=3), []),
        "temperature 0.8, top-p 0.95": (Sampling(temperature=0.8, top_p=0.95, seed=3), []),
    }
    print(f"{options.streams} streams, vocabulary {logits.shape[1]}, {options.steps} steps")
    print(f"{'sampling':32} {'median ms':>10} {'p99 ms':>10}")
    for name, (sampling, stop) in cases.items():
        median, worst = measure(options.streams, logits, options.steps, sampling, stop)
        print(f"{name:32} {median * 1e3:10.3f} {worst * 1e3:10.3f}")


if __name__ == "__main__":
    main()
