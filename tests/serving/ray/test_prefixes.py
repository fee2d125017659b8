"""The choice of a replica by load and by prefix."""

import json

from serving.ray.prefixes import BLOCK_BYTES, MOST_BEFORE, SLACK, PrefixTable, blocks_of


def body(prompt: str, **others: object) -> bytes:
    return json.dumps({**others, "prompt": prompt}).encode()


def test_bodies_share_the_blocks_of_what_they_share_of_the_prompt() -> None:
    long = "x" * (4 * BLOCK_BYTES)
    one, other = blocks_of(body(long + "one")), blocks_of(body(long + "other", max_tokens=5))
    assert one[:4] == other[:4] and one[4:] != other[4:]
    assert one[:4] != blocks_of(body("y" + long))[:4]
    assert blocks_of(b'{"tokens": [1, 2]}') == ()
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": long}]})
    assert blocks_of(chat.encode())[0] != one[0]


def test_a_body_is_not_looked_through_for_its_prompt() -> None:
    """4 MiB of quotes would hold the event loop up for a tenth of a second."""
    near, far = ({"user": '"' * (size // 2)} for size in (MOST_BEFORE - 100, MOST_BEFORE))
    assert blocks_of(body("one", **near)) == blocks_of(body("one"))
    assert blocks_of(body("one", **far)) == ()


def test_a_prompt_follows_the_longest_part_that_a_replica_has_had() -> None:
    table = PrefixTable(slots=16)
    table.sent(("a", "b", "c"), "first")
    table.sent(("a", "x"), "second")
    loads = {"first": 1, "second": 0, "third": 0}
    assert table.choose(("a", "b", "c", "d"), loads) == "first"
    assert table.choose(("a", "x", "y"), loads) == "second"
    assert table.choose(("a", "q"), loads) == "second"  # the last that had "a"
    assert table.choose(("q",), loads) == "third"  # nobody's: the one that was asked longest ago


def test_load_goes_before_prefix() -> None:
    table = PrefixTable(slots=16)
    table.sent(("a",), "first")
    assert table.choose(("a",), {"first": SLACK, "second": 0}) == "first"
    assert table.choose(("a",), {"first": SLACK + 1, "second": 0}) == "second"
    assert table.choose(("a",), {"second": 3}) == "second"  # the first is gone


def test_a_free_slot_goes_before_prefix() -> None:
    """A request that waits for a slot waits for the end of an answer."""
    table = PrefixTable(slots=2)
    table.sent(("a",), "first")
    assert table.choose(("a",), {"first": 1, "second": 0}) == "first"
    assert table.choose(("a",), {"first": 2, "second": 1}) == "second"
    assert table.choose(("a",), {"first": 2, "second": 2}) == "first"  # it waits anyhow
    assert table.choose(("a",), {"first": 2 + SLACK, "second": 2}) == "first"
    assert table.choose(("a",), {"first": 3 + SLACK, "second": 2}) == "second"


def test_equal_replicas_take_turns_and_old_prefixes_are_forgotten() -> None:
    table = PrefixTable(slots=16, most=2)
    chosen = []
    for number in range(4):
        name = table.choose((f"{number}",), {"first": 0, "second": 0})
        table.sent((f"{number}",), name)
        chosen.append(name)
    assert chosen == ["first", "second", "first", "second"]
    assert table.choose(("0",), {"first": 2, "second": 1}) == "second"  # "0" is forgotten


def test_replicas_that_are_gone_are_forgotten() -> None:
    table = PrefixTable(slots=16)
    for number in range(9):
        table.sent((), f"replica {number}")
    table.keep({"replica 7", "replica 8", "new"})
    assert table._turns.keys() == {"replica 7", "replica 8"}
    assert table.choose((), {"replica 7": 0, "replica 8": 0}) == "replica 7"
