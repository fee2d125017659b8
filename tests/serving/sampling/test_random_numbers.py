"""Random numbers of tokens against the generator's published test vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from crossover.serving.sampling.random_numbers import (
    CDF_COUNTER,
    CONSTANTS,
    GeneratorConstants,
    keys_of,
    philox,
    proposal_bits,
    proposal_counters,
)
from crossover.serving.sampling.step_inputs import Row, Sampling

ONES = 0xFFFF_FFFF
# Counter, key and words of philox4x32 with 10 rounds: kat_vectors of Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
ON_TORCH = GeneratorConstants(*(torch.from_numpy(one) for one in CONSTANTS))


def rows_of(*keys: tuple[int, int]) -> list[Row]:
    """Rows that draw, by seed and position."""
    one = np.array([1], np.int32)
    return [Row(0, one, position - 1, True, Sampling(1.0, seed=seed)) for seed, position in keys]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_generator_gives_the_words_that_were_published(
    counter: Any, key: Any, words: Any, library: str
) -> None:
    arrays = [np.array(two).reshape(2, 1, 1) for two in (counter[::2], counter[1::2], key)]
    if library == "torch":
        even, odd = philox(*(torch.from_numpy(array) for array in arrays), ON_TORCH)
    else:
        even, odd = philox(*arrays)
    assert (*even[:, 0, 0].tolist(), *odd[:, 0, 0].tolist()) == (*words[::2], *words[1::2])


def test_a_rows_numbers_depend_only_on_its_seed_and_position() -> None:
    keys = [(0, 1), (1, 1), (0, 2), (1 << 40, 1), (-1, 70_000), (1 << 63, 3)]
    counters = proposal_counters([(0, 64), (1, 256)])
    bits, member = proposal_bits(keys_of(rows_of(*keys)), counters)
    for at, key in enumerate(keys):
        single = keys_of(rows_of(key))
        assert (proposal_bits(single, counters)[0][:, 0] == bits[:, at]).all()
        second, second_member = proposal_bits(single, proposal_counters([(1, 256)]))
        assert (second[:, 0] == bits[:, at, 64:]).all(), "a round of its own"
        assert (second_member[0] == member[at, 64:]).all()
    uniform = proposal_bits(keys_of(rows_of(*keys)), CDF_COUNTER)[0][0]
    assert len({*bits.ravel().tolist(), *uniform.ravel().tolist()}) == bits.size + len(keys)
    assert bits.min() >= 0 and bits.max() < 1 << 53
    assert set(member.ravel().tolist()) == set(range(64))


def test_host_and_device_have_the_same_numbers() -> None:
    keys = keys_of(rows_of(*((seed * 977**5, 3 * seed) for seed in range(40))))
    counters = proposal_counters([(0, 64)])
    there = [torch.from_numpy(array) for array in (keys, counters)]
    for mine, theirs in zip(
        proposal_bits(keys, counters), proposal_bits(*there, ON_TORCH), strict=True
    ):
        assert (mine == theirs.numpy()).all()
