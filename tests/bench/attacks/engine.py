"""Attacks on what lies behind HTTP: tokenising, grammars, slots, prefixes, engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.synthetic import write
from models.synthetic.gguf_writer import Vocabulary
from tests.bench.attacks.edge import Attack, port_of
from tests.serving.cli.test_serve import server
from tests.serving.fakes import ask, complete, wait_until
from tests.serving.http.test_app_streams import connected, post
from tests.shapes import TINY_LLAMA
from tests.tools.holds import MOST_SECONDS, Hold, held, watched_server

GRAMMARS = {
    "a long text": 'root ::= "' + "a" * 60_000 + '"',
    "a chain of empty rules": "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(2500))
    + 'root ::= r0 "a"\nr2500 ::= ""',
    "brackets without an end": "root ::= " + "[" * 60_000,
    "blanks in a repetition": 'root ::= "a"{1,' + " " * 60_000,
}
KNOWN, SECRET = list(range(100, 124)), [339, 316, 322, 333, 301, 329, 315, 303]
GUESSES = range(300, 340)


def tiny(folder: Path, words: str = "gpt-2") -> str:
    """A GGUF file whose texts are cut into words by this rule of llama.cpp."""
    path, usual = folder / "tiny.gguf", write.shipped_vocabulary
    shape = msgspec.structs.replace(TINY_LLAMA, vocabulary=4000, context=4096)

    def named(size: int) -> Vocabulary:
        return msgspec.structs.replace(usual(size), pre=words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "shipped_vocabulary", named)
        write.write_gguf(shape, path)
    return str(path)


def long_word(folder: Path) -> tuple[str, bool]:
    options = ("--max-body", "4MiB", "--policy", "cpu-only")
    with server(folder, *options, model=tiny(folder, "tekken")) as one:
        port = port_of(one.wait_ready())
        status = ask(port, "POST", "/tokenize", {"prompt": "a" * 1_000_000}).status
        healthy = ask(port, "GET", "/health").status
    return f"{status}, then /health {healthy}", (status, healthy) == (200, 200)


def long_texts(folder: Path) -> tuple[str, bool]:
    """Four texts of 1 MiB at once."""
    with watched_server(folder, "--max-body", "4MiB", "--context", "65536") as one:
        port = port_of(one.wait_ready())
        body = {"prompt": "a" * (1 << 20)}
        with held(port) as hold, ThreadPoolExecutor(4) as crowd:
            asked = [crowd.submit(ask, port, "POST", "/tokenize", body) for _ in range(4)]
            codes = sorted(one.result().status for one in asked)
    return f"{codes}, loop held <= {hold.seconds * 1000:g} ms", hold.seconds <= MOST_SECONDS


@contextlib.contextmanager
def both_held(port: int) -> Iterator[tuple[Hold, Hold]]:
    """Of the event loop, and of the engine's."""
    with held(port) as http, held(port, "engine_loop") as engine:
        yield http, engine


def grammars(folder: Path) -> tuple[str, bool]:
    """Each with n = 16, beside a stream of somebody else."""
    options = ("--context", "4096", "--policy", "cpu-only", "--max-body", "1MiB")
    codes, longest = [], 0.0
    with watched_server(folder, *options, model=tiny(folder)) as one:
        port = port_of(one.wait_ready())
        with both_held(port) as (http, engine), connected(port, post(stream=True, max_tokens=3000)):
            for text in GRAMMARS.values():
                began = time.monotonic()
                codes.append(complete(port, n=16, max_tokens=2, grammar=text).status)
                longest = max(longest, time.monotonic() - began)
    holds = http.seconds, engine.seconds
    now = f"{codes} after <= {longest:.1f} s; loops held <= {holds[0] * 1000:g} ms, "
    return f"{now}{holds[1] * 1000:g} ms", longest < 3 and max(holds) <= MOST_SECONDS


def log_probabilities(folder: Path) -> tuple[str, bool]:
    with watched_server(folder) as one:
        port = port_of(one.wait_ready())
        with both_held(port) as (http, engine):
            asked: dict[str, Any] = {"n": 32, "max_tokens": 200, "ignore_eos": True}
            assert complete(port, logprobs=20, **asked).status == 200
        more = complete(port, logprobs=20, n=128, max_tokens=1000).status
    holds = http.seconds, engine.seconds
    now = f"loops held <= {holds[0] * 1000:g} ms, {holds[1] * 1000:g} ms; n = 128: {more}"
    return now, more == 400 and max(holds) <= MOST_SECONDS


def killer(folder: Path) -> tuple[str, bool]:
    """A prompt that ends every engine it is in, four times."""
    options = ("--option", "fail_cause=exit", "--option", "fail_token=7")
    with server(folder, *options) as one:
        port = port_of(one.wait_ready())
        codes = []
        for _ in range(4):
            answer = complete(port, prompt=[7], max_tokens=2)
            codes.append(answer.error["code"] or str(answer.status))
            wait_until(lambda: ask(port, "GET", "/ready").status == 200)
        good = complete(port, prompt=[5], max_tokens=2).status
    return f"{', '.join(codes)}; others {good}", good == 200 and "engine_killer" in codes


def flood(folder: Path) -> tuple[str, bool]:
    """A request of 128 answers, and then one of one."""
    options = ("--slots", "4", "--option", "step_seconds=0.005")
    with server(folder, *options) as one:
        port = port_of(one.wait_ready())
        with connected(port, post(n=128, max_tokens=100)):
            time.sleep(0.3)
            began = time.monotonic()
            status = complete(port, max_tokens=1).status
            seconds = time.monotonic() - began
    return f"{status} after {seconds:.1f} s", status == 200 and seconds < 2


def read_out(folder: Path, keys: str) -> int:
    """Tokens that the last of the keys reads of a prompt that the first has sent.

    A guess that is right makes `cached_tokens` larger by one.
    """
    (folder / "keys").write_text(keys)
    option = "--api-keys-file" if " " in keys else "--api-key-file"
    options = (option, str(folder / "keys")) if keys else ()
    heads = [{"Authorization": f"Bearer {line.split()[-1]}"} for line in keys.splitlines() or "-"]

    def cached(prompt: list[int]) -> int:
        usage = complete(port, heads[-1], prompt=prompt, max_tokens=1).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with server(folder, *options) as one:
        port = port_of(one.wait_ready())
        prompt = [*KNOWN, *SECRET, *range(400, 460)]
        assert complete(port, heads[0], prompt=prompt, max_tokens=1).status == 200
        found = list(KNOWN)
        for _ in SECRET:
            for guess in GUESSES:
                if cached([*found, guess, 99]) > len(found):
                    found.append(guess)
                    break
    return sum(a == b for a, b in zip(found[len(KNOWN) :], SECRET, strict=False))


def prefixes(folder: Path) -> tuple[str, bool]:
    """Without keys all is one user's: that the attack itself works."""
    counts = []
    for name, keys in (("none", ""), ("one", "k1"), ("two", "ann k1\nbob k2")):
        (folder / name).mkdir()
        counts.append(read_out(folder / name, keys))
    now = "{} of 8 without keys, {} by one key, {} by another's".format(*counts)
    return now, counts == [8, 0, 0]


ATTACKS = (
    Attack("C2", "a word of a million letters, tekken", "SIGSEGV", long_word),
    Attack("H4", "4 texts of 1 MiB", "/health 10 s late", long_texts),
    Attack("H1, H2", "4 grammars of 60 KB, n = 16", "10 to 39 s; minutes", grammars),
    Attack("M5", "n = 32, 200 tokens, top 20", "/health 2.1 s late", log_probabilities),
    Attack("M1", "a prompt that ends engines", "failed for ever", killer),
    Attack("M10", "n = 128 on 4 slots, then one", "after the 128: 16 s", flood),
    Attack("M2", "8 tokens by cached_tokens", "8 of 8 in 166 requests", prefixes),
)
