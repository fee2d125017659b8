"""Random numbers of tokens: Philox4x32-10, a counter-based generator, for all rows at once.

    bits, member = proposal_bits(keys_of(rows), proposal_counters([(0, 64)]))
    group, acceptance = bits * FRACTION          # uniform doubles [rows, 64]

A number is a function of (seed, position, lane, index) alone: a row's token depends neither on the
other rows nor on what was drawn before, and repeats after a preemption and on another day.

The functions use operators on int64 arrays only, so that numpy's arrays on the host and torch's on
a device give the same bits. The generator: J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel
random numbers: as easy as 1, 2, 3" (SC '11); their test vectors are among the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossover.serving.sampling.step_inputs import Row

Words = Any  # int64 array of numpy or torch, whose values are words of 32 bits
MASK = 0xFFFF_FFFF
FRACTION = 2.0**-53  # times 53 random bits: a uniform double in [0, 1)
CDF_LANE = 0xFFFF  # of the number that picks by inverse CDF; proposals have the lanes 0 to 3
PHILOX_ROUNDS = 10


class GeneratorConstants(NamedTuple):
    """Of the generator, as arrays where the numbers are computed."""

    multipliers: Words  # [2, 1, 1]
    key_steps: Words  # [rounds, 2, 1, 1]: what is added to the key in each round


CONSTANTS = GeneratorConstants(
    np.array([0xD2511F53, 0xCD9E8D57]).reshape(2, 1, 1),
    np.arange(PHILOX_ROUNDS).reshape(-1, 1, 1, 1)
    * np.array([0x9E3779B9, 0xBB67AE85]).reshape(2, 1, 1),
)


def keys_of(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """What the numbers of each row depend on, [4, rows, 1]: its seed's low and high word, its
    position, and 0."""
    seeds = np.array([row.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF for row in rows], np.uint64)
    keys = np.zeros((4, len(rows), 1), np.int64)
    keys[0, :, 0] = seeds & np.uint64(MASK)
    keys[1, :, 0] = seeds >> np.uint64(32)
    keys[2, :, 0] = [row.position for row in rows]
    return keys


def proposal_counters(rounds: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Index and lane, [2, 1, proposals], of the proposals of some rounds (lane, proposals)."""
    indices = np.concatenate([np.arange(count) for _, count in rounds])
    lanes = np.repeat([lane for lane, _ in rounds], [count for _, count in rounds])
    return np.stack((indices, lanes))[:, None]


CDF_COUNTER = proposal_counters([(CDF_LANE, 1)])


def philox(
    even: Words, odd: Words, key: Words, constants: GeneratorConstants = CONSTANTS
) -> tuple[Words, Words]:
    """Four random words from a counter of four words and a key of two.

    The first and third word of the counter are `even` [2, n or 1, m or 1], the second and fourth
    `odd`; the words that come back lie alike, [2, n, m]. `key` [2, n, 1].
    """
    for key_of_round in (key + constants.key_steps) & MASK:
        # Products wrap at 64 bits and a shift extends their sign: what lies above the 32nd bit is
        # masked before the next product.
        product = even * constants.multipliers
        product = product[::-1] if isinstance(product, np.ndarray) else product.flip(0)
        even = (product >> 32) ^ odd
        even ^= key_of_round
        even &= MASK
        odd = product
    return even, odd & MASK


def proposal_bits(
    keys: Words, counters: Words, constants: GeneratorConstants = CONSTANTS
) -> tuple[Words, Words]:
    """Of each proposal of each row 53 bits for its group and 53 for whether it is accepted,
    [2, rows, proposals], and its member of 64, [rows, proposals]: see
    crossover.serving.sampling.top_k_top_p."""
    even, odd = philox(counters, keys[2:], keys[:2], constants)
    return (even << 21) | (odd >> 11), odd[0] & 63
