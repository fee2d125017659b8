import random

import pytest

from crossover.serving.engine.detokenize_and_stop import StreamText, ThoughtMarks


def stream(
    pieces: list[bytes], stops: list[str], include_stop: bool = False
) -> tuple[list[str], bool]:
    text = StreamText(pieces, stops, include_stop)
    deltas = []
    for index in range(len(pieces)):
        delta, stopped = text.push(index)
        deltas.append(delta)
        if stopped:
            return deltas, True
    return [*deltas, text.finish()], False


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    euro = "€".encode()
    assert stream([b"5 ", euro[:1], euro[1:2], euro[2:], b"!"], [])[0] == [
        "5 ",
        "",
        "",
        "€",
        "!",
        "",
    ]


def test_an_unfinished_character_becomes_a_replacement_character_at_the_end() -> None:
    assert "".join(stream([b"a", "€".encode()[:2]], [])[0]) == "a\ufffd"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one STOP")])
def test_a_stop_string_over_three_tokens_is_cut_and_never_sent(
    include: bool, expected: str
) -> None:
    deltas, stopped = stream([b"one S", b"T", b"OP two"], ["STOP"], include)
    assert stopped
    assert "".join(deltas) == expected
    assert "S" not in deltas[0]


def test_the_earliest_stop_wins_and_a_false_start_is_released() -> None:
    assert stream([b"ab", b"ac", b"xyz"], ["abad", "z"]) == (["", "abac", "xy"], True)


def test_deltas_concatenate_to_the_cut_text_for_random_streams() -> None:
    rng = random.Random(5)
    for _ in range(300):
        whole = "".join(rng.choice("abé€😀") for _ in range(30))
        data, pieces = whole.encode(), []
        while data:
            size = rng.randint(1, 4)
            pieces.append(data[:size])
            data = data[size:]
        stops = ["".join(rng.choice("abé€") for _ in range(rng.randint(1, 4))) for _ in range(2)]
        cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
        assert "".join(stream(pieces, stops)[0]) == whole[:cut]


TAGS = ThoughtMarks(["<think>"], ["</think>"], only_first=True)
OPEN = ThoughtMarks(["<think>"], ["</think>"], is_open=True, only_first=True)
CHANNELS = ThoughtMarks(["<|channel>"], ["<channel|>"])
MESSAGES = ThoughtMarks(["<|channel|>analysis", "<|start|>"], ["<|channel|>final"])


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("marks", "text", "expected"),
    [
        (TAGS, "<think>a END b</think>\n\nc END d", "<think>a END b</think>\n\nc "),
        (TAGS, " <think>a\n\nb</think>\n\nc\n\nd", " <think>a\n\nb</think>\n\nc"),
        (TAGS, "a END <think>", "a "),
        (TAGS, "<thinEND", "<thin"),
        (TAGS, "a <think>END</think>", "a <think>"),
        (TAGS, "<think>a END", "<think>a END"),
        (OPEN, "a END</think> ENDS", "a END</think> "),
        (CHANNELS, "<|channel>END<channel|>a<|channel>END<channel|>END", None),
        (MESSAGES, "<|channel|>analysis END<|end|><|start|>a END<|channel|>final END", None),
    ],
)
def test_stop_strings_do_not_count_in_thoughts(
    marks: ThoughtMarks, text: str, expected: str | None, size: int
) -> None:
    pieces = [text[start : start + size].encode() for start in range(0, len(text), size)]
    expected = text.removesuffix("END") if expected is None else expected
    stream = StreamText(pieces, ["END", "\n\n"], thoughts=marks)
    written = ""
    for token in range(len(pieces)):
        delta, is_stopped = stream.push(token)
        written += delta
        if is_stopped:
            break
    else:
        written += stream.finish()
    assert written == expected
