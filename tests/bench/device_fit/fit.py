"""Fit the predictor's constants to the published rows, and say how wrong they are.

    python -m tests.bench.device_fit.fit    # data/fitted.json, data/errors.csv.gz, and what is
                                            # shipped: step_time_constants.json

    TPOT     = t + phi * (n - 1) / output * prompt       n: streams that fit the KV room
    TTFT     = t0 + prompt * (s + (n + 1) / 2k) + queue  k: weight of the opening burst

Gauss-Newton (Levenberg's damping) on Huber's loss of log errors; each node is shrunk to its prior
by a ridge. Each device is left out in turn, and predicted by constants that never saw it.
"""

from __future__ import annotations

import copy
import gzip
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.reports.devices import device_step_times
from crossover.reports.devices.device_step_times import DeviceConstants
from tests.bench.device_fit.facts import DATA
from tests.bench.device_fit.published import CLOSED_LOOP, ENERGY, POWER, Row, published_rows
from tests.bench.device_fit.step_model import (
    ACCELERATOR,
    Array,
    Case,
    Chip,
    ClassError,
    Columns,
    Constant,
    Predictor,
    accelerator_decode,
    accelerator_prefill,
    features,
)

WEIGHTS = {POWER: 0.3, CLOSED_LOOP: 0.3, ENERGY: 0.3}  # rougher, or many rows of few devices
SIGMA = 0.15  # log error that counts as one
HUBER = 1.5  # of them; beyond, errors count by their size only
MIN_LOG = 0.03  # of a node that is kept: a class that is as its parents has none
STEPS = 60
BUMP = 1e-4  # of a log, for derivatives
SETTLED = 2e-4  # of a log: no constant moves more
DIGITS = 3  # of a shipped log

METRICS = ("decode", "prefill", "tpot", "ttft")  # the last two of a closed loop of streams
KV_MEMORY_SHARE = 0.92  # of the memory, less the weights, is the KV cache's
FITTED_FILE = DATA / "fitted.json"
SHIPPED_FILE = Path(device_step_times.__file__).with_name("step_time_constants.json")
# What is shipped: devices by memory type and maker, `other` where no row is of the maker's.
MEMORY_TYPES = ("apple", "uma")
MAKERS = ("nvidia", "amd", "intel", "other")
FORMATS = {"16": "F16", "8": "Q8_0", "fp4": "FP4", "q0": "Q4_0", "kq": "Q4_K_M"}
FORMATS |= {"k23": "Q2_K", "iq": "IQ2_XS"}

SERVING: dict[str, Constant] = {
    **ACCELERATOR,
    "phi": Constant(0.8, 0.4, {"server": 0.4}),  # share of others' prompts that delays a token
    "s": Constant(2.0, 0.5, {"server": 0.5}),  # prompts waited for at an arrival
    "k": Constant(5.0, 0.7, {"server": 0.7}),  # the opening burst counts 1/k
    "t0": Constant(30e-3, 0.7, {"server": 0.5}),  # from the socket to the queue, seconds
}


def facts_of(rows: Sequence[Row]) -> dict[str, Array]:
    """What the formulas take, and what a closed loop's do besides."""
    more = {
        "metric": [float(METRICS.index(row.metric)) for row in rows],
        "streams": [row.case.rows for row in rows],
        "output": [row.case.output for row in rows],
        "file": [row.case.file_bytes for row in rows],
        "memory": [row.case.chip.gib * 2**30 * row.case.devices for row in rows],
    }
    return features([row.case for row in rows]) | {k: np.array(v) for k, v in more.items()}


def accelerator_seconds(v: Columns, f: Columns) -> Array:
    """Of each row's metric, by its constants `v` and facts `f`."""
    one = accelerator_prefill(v, f, 1.0)
    each = f["kv"] * (f["prompt"] + 0.5 * f["output"])
    room = np.maximum(KV_MEMORY_SHARE * f["memory"] - f["file"], 2e9) / each
    fitting = np.maximum(np.minimum(f["streams"], room), 1.0)
    running = np.where(f["server"] > 0, fitting, f["streams"])
    tpot = accelerator_decode(v, f, running)
    tpot = tpot + v["phi"] * np.maximum(running - 1, 0) / f["output"] * one
    queue = (f["streams"] / running - 1) * (one + f["output"] * tpot)
    ttft = v["t0"] + one * (v["s"] + (running + 1) / (2 * v["k"])) + queue
    rows = f["rows"]
    predictions = [accelerator_decode(v, f, rows), accelerator_prefill(v, f, rows), tpot, ttft]
    return np.choose(f["metric"].astype(int), predictions)


class Problem:
    """The rows: their facts, what was seen, and which nodes make their constants."""

    def __init__(
        self,
        rows: Sequence[Row],
        kept: Collection[str] | None = None,  # nodes; None: all
    ) -> None:
        from scipy import sparse

        self.rows = rows
        self.facts = facts_of(rows)
        self.seen = np.log([row.seconds for row in rows])
        self.weights = np.array([WEIGHTS.get(row.case.group, 1.0) for row in rows])
        names = {
            key: [constant.nodes(key, row.case) for row in rows]
            for key, constant in SERVING.items()
        }
        self.nodes, self.mean, self.spread = _priors(names, kept)
        place = {node: index for index, node in enumerate(self.nodes)}
        self.design = {}
        for key, of_rows in names.items():
            pairs = [(i, place[n]) for i, each in enumerate(of_rows) for n in each if n in place]
            at = np.array(pairs).T
            self.design[key] = sparse.csr_matrix(
                (np.ones(len(pairs)), (at[0], at[1])), shape=(len(rows), len(self.nodes))
            )

    def part(self, keep: npt.NDArray[np.int64]) -> Problem:
        """Some of its rows, and all of its nodes."""
        part = copy.copy(self)
        part.rows = [self.rows[i] for i in keep]
        part.facts = {key: column[keep] for key, column in self.facts.items()}
        part.seen = self.seen[keep]
        part.weights = self.weights[keep]
        part.design = {key: matrix[keep] for key, matrix in self.design.items()}
        return part

    def predicted(self, logs: Array, bump: str = "") -> Array:
        """ln(seconds) of each row."""
        values = {
            key: np.exp(matrix @ logs + (BUMP if key == bump else 0.0))
            for key, matrix in self.design.items()
        }
        return np.log(accelerator_seconds(values, self.facts))

    def cost(self, logs: Array) -> float:
        """Huber's loss of the log errors, and the ridge."""
        size = np.abs(self.predicted(logs) - self.seen) / SIGMA
        loss = np.where(size < HUBER, size * size / 2, HUBER * size - HUBER**2 / 2)
        ridge = np.sum(((logs - self.mean) / self.spread) ** 2) / 2
        return float(self.weights @ loss + ridge)

    def curve_and_slope(self, logs: Array) -> tuple[Array, Array]:
        """Gauss-Newton's matrix [nodes, nodes] and the gradient of the cost [nodes]."""
        from scipy import sparse

        base = self.predicted(logs)
        error = (base - self.seen) / SIGMA
        jacobian = sparse.csr_matrix((len(self.rows), len(self.nodes)))
        for key, matrix in self.design.items():
            slopes = (self.predicted(logs, key) - base) / (BUMP * SIGMA)
            jacobian = jacobian + sparse.diags(slopes) @ matrix
        robust = self.weights * np.minimum(1, HUBER / np.maximum(np.abs(error), 1e-9))
        curve = (jacobian.T @ sparse.diags(robust) @ jacobian).toarray()
        curve += np.diag(1 / self.spread**2)
        slope = jacobian.T @ (robust * error) + (logs - self.mean) / self.spread**2
        return curve, slope

    def solve(self, start: Array | None = None, steps: int = STEPS) -> Array:
        """Logs of the nodes that cost least, from a start."""
        logs = self.mean.copy() if start is None else start.copy()
        now, damping = self.cost(logs), 1e-3
        for _ in range(steps):
            curve, slope = self.curve_and_slope(logs)
            for _ in range(8):
                damped = curve + damping * np.diag(np.diag(curve))
                move = np.linalg.solve(damped, -slope)
                move *= min(1.0, 1.5 / max(float(np.abs(move).max()), 1e-9))
                after = self.cost(logs + move)
                if after <= now:
                    break
                damping *= 8
            if after > now:
                break
            logs, now, damping = logs + move, after, max(damping / 5, 1e-9)
            if float(np.abs(move).max()) < SETTLED:
                break
        return logs


def _priors(
    names: dict[str, list[dict[str, float]]],
    kept: Collection[str] | None,
) -> tuple[list[str], Array, Array]:
    """Nodes, the mean and the spread of their logs."""
    nodes: list[str] = []
    mean, spread = list[float](), list[float]()
    for key, constant in SERVING.items():
        spreads = {node: each[node] for each in names[key] for node in each}
        for node in spreads:
            if node == key or kept is None or node in kept:
                nodes.append(node)
                mean.append(float(np.log(constant.prior)) if node == key else 0.0)
                spread.append(spreads[node])
    return nodes, np.array(mean), np.array(spread)


def _kept(problem: Problem) -> list[str]:
    """Nodes that matter where all are fitted: general ones, and classes that differ."""
    logs = dict(zip(problem.nodes, problem.solve().tolist(), strict=True))
    return [node for node, log in logs.items() if "|" not in node or abs(log) >= MIN_LOG]


class Fitted(msgspec.Struct, frozen=True):
    """Logs of the nodes from all rows, and of each row ln(predicted / seen) where its device was
    left out.
    """

    logs: dict[str, float]
    rows: list[Row]
    log_errors: Array


def fit(rows: Sequence[Row], say: Callable[[str], None] = print) -> Fitted:
    """The constants, and the errors of leaving each device out."""
    problem = Problem(rows, _kept(Problem(rows)))
    full = problem.solve()
    names = np.array([row.case.chip.name for row in rows])
    left = np.zeros(len(names))
    devices = sorted(set(names.tolist()))
    for number, name in enumerate(devices, 1):
        began = time.monotonic()
        out = names == name
        rest = problem.part(np.flatnonzero(~out)).solve(full)
        part = problem.part(np.flatnonzero(out))
        left[out] = part.predicted(rest) - part.seen
        say(f"{number}/{len(devices)} {name}: left out in {time.monotonic() - began:.1f} s")
    return Fitted(dict(zip(problem.nodes, full.tolist(), strict=True)), list(rows), left)


def half_width(errors: Array, devices: Sequence[str]) -> float:
    """Of |log errors|; each device has the root of its rows as votes; wider the fewer they are."""
    rows = Counter(devices)
    order = np.argsort(errors)
    votes = np.cumsum([rows[devices[i]] ** -0.5 for i in order])
    at = int(np.searchsorted(votes, 0.9 * votes[-1]))
    return float(errors[order][at]) * (1 + 1 / len(rows))


def class_errors(rows: Sequence[Row], log_errors: Array) -> dict[str, ClassError]:
    """By class; the interval of a device comes from the other devices of its class."""
    names = np.array([row.case.chip.name for row in rows])
    classes = np.array([row.case.error_class(row.metric) for row in rows])
    is_time = np.array([row.metric in ("tpot", "ttft") for row in rows])
    percent = 100 * (np.exp(np.where(is_time, log_errors, -log_errors)) - 1)
    found = {}
    for name in sorted(set(classes.tolist())):
        own = np.flatnonzero(classes == name)
        size, of = np.abs(log_errors[own]), names[own]
        covered = np.ones(len(own), dtype=bool)
        for device in set(of.tolist()):
            rest = of != device
            if rest.any():
                width = half_width(size[rest], of[rest].tolist())
                covered[~rest] = size[~rest] <= width
        wrong = np.abs(percent[own])
        found[name] = ClassError(
            rows=len(own),
            devices=len(set(of.tolist())),
            median=round(float(np.median(wrong)), 1),
            mape=round(float(wrong.mean()), 1),
            p90=round(float(np.quantile(wrong, 0.9)), 1),
            bias=round(float(np.median(percent[own])), 1),
            covered=round(100 * float(covered.mean()), 1),
            half_width=round(half_width(size, of.tolist()), 3),
        )
    return found


def table(errors: Mapping[str, ClassError]) -> str:
    """For people."""
    head = f"{'class':22} rows devices median %  MAPE %   p90 %  bias %  in the 90 % interval"
    lines = [
        f"{name:22} {e.rows:4} {e.devices:7} {e.median:8} {e.mape:7} {e.p90:7} {e.bias:+7} "
        f"{e.covered:7}"
        for name, e in errors.items()
    ]
    return "\n".join([head, *lines])


def shipped(by: Predictor) -> dict[str, DeviceConstants]:
    """The constants of each class of devices that `crossover` predicts."""
    return {
        f"{memory}|{maker}": _of_class(by, memory, maker)
        for memory in MEMORY_TYPES
        for maker in MAKERS
    }


def _of_class(by: Predictor, memory: str, maker: str) -> DeviceConstants:
    def values(name: str, fmt: str = "F16") -> float:
        chip = Chip(name="", memory=memory, chip=maker, gbs=1.0)
        case = Case(
            chip=chip,
            engine="llama.cpp",
            fmt=fmt,
            macs=0,
            layers=0,
            hidden=0,
            attention=0,
            kv_bytes=0,
            read_bytes=0,
            all_bytes=0,
        )
        return float(f"{by.values({name: ACCELERATOR[name]}, [case])[name][0]:.6g}")

    return DeviceConstants(
        bandwidth_share=values("eff"),
        peak_share={kind: values("mfu", fmt) for kind, fmt in FORMATS.items()},
        prompt_peak_share={kind: values("mfup", fmt) for kind, fmt in FORMATS.items()},
        kv=values("kv"),
        attention=values("atp"),
        layer_seconds=values("lat"),
        prompt_layer_seconds=values("latp"),
        half_width=max(
            by.errors[f"{metric}|{memory}|llama"].half_width for metric in ("decode", "prefill")
        ),
    )


def fitted() -> Predictor:
    """What data/fitted.json says."""
    return msgspec.json.decode(FITTED_FILE.read_bytes(), type=Predictor)


def write(done: Fitted) -> Predictor:
    """Logs of the nodes; what is shipped; ln(predicted / seen) with each device left out."""
    logs = {node: round(value, DIGITS) for node, value in done.logs.items()}
    log_errors = np.round(done.log_errors, DIGITS)
    made = Predictor(logs, class_errors(done.rows, log_errors))
    for file, content in ((FITTED_FILE, made), (SHIPPED_FILE, shipped(made))):
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    lines = [
        f"{row.id},{row.metric},{error:.{DIGITS}f}\n"
        for row, error in zip(done.rows, log_errors, strict=True)
    ]
    packed = gzip.compress("".join(["id,metric,ln_error\n", *lines]).encode(), 9, mtime=0)
    DATA.joinpath("errors.csv.gz").write_bytes(packed)
    return made


def main() -> int:
    """Fit, write, and print the errors by class."""
    began = time.monotonic()
    rows, left_out = published_rows()
    made = write(fit(rows, lambda line: print(line, file=sys.stderr)))
    print(table(made.errors))
    inside = sum(e.covered * e.rows for e in made.errors.values()) / len(rows)
    print(
        f"{len(rows)} numbers, {len(made.logs)} constants; {inside:.1f} % in the 90 % interval; "
        f"{time.monotonic() - began:.0f} s"
    )
    print("left out:", "; ".join(f"{count} {why}" for why, count in sorted(left_out.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
