"""Joint quantile tables of (prompt, output) lengths: how a trace's lengths are shipped without the trace.

No lognormal passes a Kolmogorov-Smirnov test on any public trace (D is 0.07 to 0.22), so presets are the empirical joint distribution:
the quantile function of the prompt length, and for each band of prompt lengths that of the output length. `joint_table` makes one from
rows of lengths (shipped ones: loadtests/data, remade by `python -m loadtests.tables FILE SOURCE LICENCE TOKENIZER`), `JointTable.sample`
draws from it.
"""

from __future__ import annotations

import functools
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

PRESETS: tuple[str, ...] = ("chat", "code", "sharegpt", "summarise")

# Finer towards the end: the longest prompts and answers are what breaks a promise.
LEVELS: tuple[float, ...] = (*(i / 50 for i in range(48)), 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
OUTPUT_LEVELS: tuple[float, ...] = (*(i / 20 for i in range(19)), 0.925, 0.95, 0.975, 0.99, 1.0)
BANDS: tuple[float, ...] = tuple(i / 20 for i in range(21))


class JointTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`prompt[i]` is the quantile of the prompt length at `levels[i]`; `output[b][j]` that of the output length at `output_levels[j]` for
    prompts between levels `bands[b]` and `bands[b + 1]`. Between quantiles the inverse is linear. Lengths in tokens of `tokenizer`."""

    source: str
    licence: str
    tokenizer: str
    rows: int | None  # of the trace; None: made from published quantiles
    method: str
    levels: tuple[float, ...]
    prompt: tuple[int, ...]
    bands: tuple[float, ...]
    output_levels: tuple[float, ...]
    output: tuple[tuple[int, ...], ...]

    def sample(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """(prompt, output) pairs for uniform numbers: float64 [n, 2] in, int64 [n, 2] out, each at least 1."""
        prompt = np.interp(uniform[:, 0], self.levels, self.prompt)
        band = np.clip(np.searchsorted(self.bands, uniform[:, 0], side="right") - 1, 0, len(self.output) - 1)
        output = np.empty(len(uniform))
        for b, quantiles in enumerate(self.output):
            mine = band == b
            output[mine] = np.interp(uniform[mine, 1], self.output_levels, quantiles)
        return np.maximum(1, np.rint(np.column_stack([prompt, output]))).astype(np.int64)


@functools.cache
def preset_table(name: str) -> JointTable:
    """A shipped table, one of PRESETS."""
    return msgspec.json.decode(resources.files("loadtests").joinpath("data", f"{name}.json").read_bytes(), type=JointTable)


def joint_table(pairs: npt.NDArray[np.int64], *, source: str, licence: str, tokenizer: str) -> JointTable:
    """The table of rows of (prompt, output) lengths, int64 [n, 2]; needs at least 400 rows to fill its bands."""
    if len(pairs) < 400:
        raise ValueError(f"{len(pairs)} rows are too few for a joint table: at least 400 are needed")
    # Rows with equal prompts are shuffled, so that a band's border within them says nothing about their outputs.
    rng = np.random.Generator(np.random.Philox(0))
    order = np.lexsort((rng.random(len(pairs)), pairs[:, 0]))
    rows = pairs[order]
    edges = [round(level * len(rows)) for level in BANDS]
    return JointTable(
        source=source,
        licence=licence,
        tokenizer=tokenizer,
        rows=len(rows),
        method="quantiles of the prompt length, and of the output length within 20 equal bands of prompt length",
        levels=LEVELS,
        prompt=_quantiles(rows[:, 0], LEVELS),
        bands=BANDS,
        output_levels=OUTPUT_LEVELS,
        output=tuple(_quantiles(rows[low:high, 1], OUTPUT_LEVELS) for low, high in zip(edges, edges[1:], strict=False)),
    )


def table_from_marginals(
    prompt: dict[float, int], output: dict[float, int], spearman: float, *, source: str, licence: str, tokenizer: str
) -> JointTable:
    """A table where only each length's quantiles and their rank correlation are published: a Gaussian copula joins them.

    Below the lowest published quantile lengths stay at it: nothing is known there.
    """
    from statistics import NormalDist

    normal = NormalDist()
    rho = 2 * np.sin(np.pi * spearman / 6)  # Pearson of the normal pair that has this Spearman (Kruskal 1958)
    middles = [(low + high) / 2 for low, high in zip(BANDS, BANDS[1:], strict=False)]
    rest = float(np.sqrt(1 - rho**2))

    def output_at(middle: float, level: float) -> int:
        return _published(output, normal.cdf(rho * normal.inv_cdf(middle) + rest * _inverse_normal(level)))

    return JointTable(
        source=source,
        licence=licence,
        tokenizer=tokenizer,
        rows=None,
        method=f"published quantiles of each length, joined by a Gaussian copula with the published Spearman correlation {spearman}",
        levels=LEVELS,
        prompt=tuple(_published(prompt, level) for level in LEVELS),
        bands=BANDS,
        output_levels=OUTPUT_LEVELS,
        output=tuple(tuple(output_at(middle, level) for level in OUTPUT_LEVELS) for middle in middles),
    )


def _quantiles(values: npt.NDArray[np.int64], levels: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(int(v) for v in np.quantile(values, levels, method="inverted_cdf"))


def _published(quantiles: dict[float, int], level: float) -> int:
    return round(float(np.interp(level, sorted(quantiles), [quantiles[q] for q in sorted(quantiles)])))


def _inverse_normal(level: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(min(max(level, 1e-9), 1 - 1e-9))


def _main() -> None:
    import sys

    from loadtests.traces import load_trace

    if len(sys.argv) != 5:
        raise SystemExit("usage: python -m loadtests.tables FILE SOURCE LICENCE TOKENIZER > TABLE.json")
    path, source, licence, tokenizer = sys.argv[1:]
    rows = load_trace(path)
    table = joint_table(np.column_stack([rows.prompt_tokens, rows.output_tokens]), source=source, licence=licence, tokenizer=tokenizer)
    sys.stdout.write(msgspec.json.encode(table).decode() + "\n")


if __name__ == "__main__":
    _main()
