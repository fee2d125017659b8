"""Who runs on which core."""

from pathlib import Path

import pytest

from crossover.serving.errors import ServingError
from crossover.serving.hardware.cpu_topology import (
    SHARED_NICE,
    cores_text,
    parse_cores,
    physical_of,
    split_cores,
)

Cores = tuple[int, ...]


@pytest.mark.parametrize(
    ("allowed", "engine", "api", "expected_engine", "expected_api"),
    [
        (tuple(range(9)), (), (), tuple(range(8)), (8,)),
        (tuple(range(8)), (), (), tuple(range(8)), tuple(range(8))),
        ((4, 6), (), (), (4, 6), (4, 6)),
        ((0,), (), (), (0,), (0,)),
        ((0, 1, 2, 3), (0, 1), (), (0, 1), (2, 3)),
        ((0, 1), (0, 1), (), (0, 1), (0, 1)),
        ((0, 1, 2, 3), (), (0,), (1, 2, 3), (0,)),
        ((0,), (), (0,), (0,), (0,)),
        ((0, 1, 2, 3), (1,), (1,), (1,), (1,)),
    ],
)
def test_cores_are_divided(
    allowed: Cores, engine: Cores, api: Cores, expected_engine: Cores, expected_api: Cores
) -> None:
    split = split_cores(allowed, engine, api, root=Path("/nowhere"))
    assert (split.engine, split.api) == (expected_engine, expected_api)
    assert split.threads == len(expected_engine) and cores_text(expected_engine) in split.note
    is_shared = bool(set(split.engine) & set(split.api))
    assert split.nice == (SHARED_NICE if is_shared else 0)
    assert (f"at nice {SHARED_NICE}" in split.note) == is_shared


def test_one_thread_for_each_physical_core_by_default(tmp_path: Path) -> None:
    for core, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_of((0, 1, 2, 7), tmp_path) == {0: 0, 1: 1, 2: 0, 7: 7}
    assert split_cores((0, 1, 2), root=tmp_path).threads == 2
    assert split_cores((0, 1, 2), threads=4, root=tmp_path).threads == 4


def test_a_core_that_is_not_allowed_is_named() -> None:
    with pytest.raises(ServingError, match=r"--cores names core 9.*Allowed cores: 0-1,4"):
        split_cores((0, 1, 4), (9,))
    with pytest.raises(ServingError, match="--api-cores names core 2"):
        split_cores((0, 1), (), (2,))
    for text in ("a", "1-", "-1", "3-1", "1,,2", "1.5", "0-99999999999"):
        with pytest.raises(ServingError, match="^--cores '.*' is not a list of cores"):
            parse_cores(text, "--cores")
