"""Prompts of an exact token count."""

import hashlib

import pytest

from loadtests.errors import LoadError
from loadtests.workload.exact_prompts import WORDS, PromptMaker
from loadtests.workload.request_lengths import Ask


class Server:
    """Counts tokens as a server would: some words are two tokens, every prompt gets a few more."""

    def __init__(self, added=3, long_words=frozenset(WORDS[10:40]), drift=0):
        self.added, self.long_words, self.drift, self.calls = added, long_words, drift, 0

    def __call__(self, text):
        self.calls += 1
        return (
            self.added
            + sum(2 if word in self.long_words else 1 for word in text.split())
            + self.drift * self.calls
        )


@pytest.mark.parametrize(
    "server",
    [Server(0, frozenset()), Server(), Server(added=27), Server(long_words=frozenset(WORDS[::3]))],
)
def test_prompts_have_the_exact_count(server):
    maker = PromptMaker(server, seed=1)
    for index, tokens in enumerate((300, 40, 64, 1000, 129, 4096, 31, 500, 777, 88, 50)):
        text, counted = maker.make(Ask(index, tokens, 5))
        assert counted == tokens == Server.__call__(server, text)


def test_making_many_prompts_takes_few_calls():
    server = Server(0, frozenset())
    maker = PromptMaker(server, seed=1)
    assert server.calls <= 4
    for index in range(1000):
        maker.make(Ask(index, 100 + index, 5))
    assert server.calls <= 12


def test_prompts_do_not_start_alike_and_are_seeded():
    maker, again, other = (
        PromptMaker(None, seed=1),
        PromptMaker(None, seed=1),
        PromptMaker(None, seed=2),
    )
    texts = [maker.make(Ask(index, 40, 5))[0] for index in range(200)]
    assert len({tuple(text.split()[:4]) for text in texts}) == 200
    assert texts[7] == again.make(Ask(7, 40, 5))[0] != other.make(Ask(7, 40, 5))[0]


def test_a_count_that_cannot_be_met_is_an_error():
    with pytest.raises(LoadError, match="one token each"):
        PromptMaker(lambda text: len(text), seed=1)
    drifting = Server(0, frozenset())
    maker = PromptMaker(drifting, seed=1)
    drifting.drift = 5
    with pytest.raises(LoadError, match="is the token count stable"):
        maker.make(Ask(0, 50, 5))


def counted_by(vocabulary):
    """A token count by the shipped tokenizer, or by a smaller one that is made here."""
    from importlib import resources

    from models.tokenizer import load_tokenizer

    data = resources.files("models").joinpath("data")
    if vocabulary == "shipped":
        shipped = load_tokenizer(data.joinpath("tokenizer.json"))
        return lambda text: len(shipped.encode(text))
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    small = Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=2500, show_progress=False)
    small.train_from_iterator([data.joinpath("corpus.txt").read_text()], trainer)
    return lambda text: len(small.encode(text).ids)


def test_the_shipped_tokenizer_is_met_exactly():
    count = counted_by("shipped")
    maker = PromptMaker(count, seed=3)
    for index, tokens in enumerate((64, 300, 500, 33, 128, 256, 90, 77, 64, 250, 512)):
        assert count(maker.make(Ask(index, tokens, 5))[0]) == tokens


@pytest.mark.parametrize("vocabulary", ["shipped", "small"])
def test_the_shortest_prompts_can_always_be_made(vocabulary):
    """A word that begins a text may be four tokens there, more than the whole prompt."""
    count = counted_by(vocabulary)
    for seed in range(40):
        maker = PromptMaker(count, seed=seed)
        for index in range(6):
            text, tokens = maker.make(Ask(index, 2 + index % 3, 5))
            assert count(text) == tokens == max(3, 2 + index % 3)


def test_the_words_stay_the_same_so_that_seeds_repeat_across_versions():
    """Runs of two versions are compared: a seed must ask for the same text in both."""
    text = " ".join(WORDS)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "5006ac085dd561cf"
    made = PromptMaker(None, seed=1).make(Ask(3, 12, 5))[0]
    assert made == "told told large still last sure land group can back usually not"
