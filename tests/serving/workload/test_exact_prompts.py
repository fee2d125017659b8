"""Prompts of an exact token count."""

import hashlib
import itertools
from importlib import resources

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.workload.exact_prompts import WORDS, PromptMaker
from crossover.serving.workload.request_lengths import RequestSpec


def texts(seed, count, prefix=0):
    maker = PromptMaker(seed)
    return [maker.make(RequestSpec(index, 40, 5, prefix))[0].split() for index in range(count)]


def common(words, others):
    pairs = zip(words, others, strict=True)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_prompts_are_seeded_and_share_only_their_prefix():
    own, prefixed = texts(1, 60), texts(1, 60, prefix=30)
    assert own == texts(1, 60) and own[7] != texts(2, 8)[7]
    for pair in itertools.combinations(range(60), 2):
        assert common(*(own[i] for i in pair)) <= 4
        assert 30 <= common(*(prefixed[i] for i in pair)) <= 34
    assert common(prefixed[0], texts(2, 1, prefix=30)[0]) >= 30, "of all seeds"


def test_a_server_s_own_counts_are_met():
    """A template of 27 tokens; words of 1.25 tokens; and the shortest prompt that there is."""
    for fixed, word in ((27.0, 1.0), (3.0, 1.25), (-0.25, 1.25)):
        maker = PromptMaker(1, fixed, word)
        for requested in (2, 64, 1000, 4096):
            text, tokens = maker.make(RequestSpec(0, requested, 5))
            assert tokens == round(fixed + word * len(text.split()))
            assert abs(tokens - requested) <= 1 or (requested < fixed and len(text.split()) == 1)


def test_the_shipped_tokenizer_is_met_exactly():
    tokenizer = load_tokenizer(
        resources.files("crossover.models").joinpath("data", "tokenizer.json")
    )
    for seed in range(40):
        maker = PromptMaker(seed)
        for index, requested in enumerate((1, 2, 3, 33, 512)):
            text, tokens = maker.make(RequestSpec(index, requested, 5))
            assert len(tokenizer.encode(text)) == tokens == requested


def test_the_words_stay_the_same_so_that_seeds_repeat_across_versions():
    """Runs of two versions are compared: a seed must ask for the same text in both."""
    text = " ".join(WORDS)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "6dc9c28b6342a44d"
    made = PromptMaker(1).make(RequestSpec(3, 12, 5))[0]
    assert made == "the heard finally travel other her over pattern all mark think dog"
