"""Text of a choice: stop strings over token borders, cut characters, where it ends."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.output import ChoiceOutput, Piece
from coordinator.stop_strings import StopStrings
from splitserve.request import SampledToken

# SmolLM2-135M-Instruct's answer to "A B C D E F G", token by token.
R3 = [" H", " I", " K", " L", " P", " Q", " R", " S", " T", " U", "\n", "\n"]


class Words:
    """A detokenizer whose tokens are given strings or bytes."""

    def __init__(self, words: list[str] | list[bytes]) -> None:
        self._words = [w.encode() if isinstance(w, str) else w for w in words]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._words[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def run(
    words: list[str] | list[bytes],
    stops: list[str],
    *,
    finish: str = "length",
    per_push: int = 1,
    min_tokens: int = 0,
) -> tuple[list[Piece], ChoiceOutput]:
    """Push all tokens, the last with its finish, until the choice has ended."""
    output = ChoiceOutput(0, Words(words), stops, min_tokens)
    tokens = [SampledToken(i) for i in range(len(words))]
    pieces = []
    for start in range(0, len(tokens), per_push):
        end = start + per_push
        reason = finish if end >= len(tokens) else None
        pieces.append(output.push(tokens[start:end], reason))  # type: ignore[arg-type]
        if output.finish is not None:
            break
    return pieces, output


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("per_push", [1, 2, 3, 12])
@pytest.mark.parametrize(
    ("stops", "text", "finish", "num_tokens"),
    [
        (["K L P"], " H I ", "stop", 5),
        (["L P Z"], "".join(R3), "length", 12),  # begins, and never completes
        (["H", "K"], " ", "stop", 1),
        (["K", "H"], " ", "stop", 1),
        (["I"], " H ", "stop", 2),
        ([" U\n\n"], " H I K L P Q R S T", "stop", 12),
        ([" U\n\n\n"], "".join(R3), "length", 12),  # held until the very end
        ([], "".join(R3), "length", 12),
    ],
)
def test_stop_strings_across_tokens(
    per_push: int, stops: list[str], text: str, finish: str, num_tokens: int
) -> None:
    """vllm-project/vllm#3574 and #2577: the beginning of a stop string leaked, or never matched."""
    pieces, output = run(R3, stops, per_push=per_push)
    assert text_of(pieces) == text
    assert output.finish == finish and pieces[-1].finish == finish
    assert output.num_tokens == num_tokens, "those past the stop don't count"
    assert pieces[-1].stopped_by_text == (finish == "stop")


def test_no_piece_shows_the_beginning_of_a_stop_string() -> None:
    pieces, _ = run(R3, ["K L P"])
    assert not any("K" in piece.text for piece in pieces)
    assert [piece.text for piece in pieces] == [" H", " I", " ", "", ""]


def test_text_behind_a_false_beginning_comes_at_once() -> None:
    pieces, _ = run(R3, ["L P Z"])
    assert [piece.text for piece in pieces[:7]] == [" H", " I", " K", " ", "", "L P Q", " R"]


def test_tokens_of_one_delivery_end_with_the_stop() -> None:
    pieces, output = run(R3, ["I"], per_push=12)
    assert [one.token.token_id for one in pieces[0].tokens] == [0, 1]
    assert output.num_tokens == 2


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_token_that_stops_is_not_text(reason: str) -> None:
    pieces, output = run(["a", "b", "<eos>"], [], finish=reason)
    assert text_of(pieces) == ("ab" if reason == "stop" else "ab<eos>")
    assert output.num_tokens == 3, "it counts all the same"


def test_eos_flushes_what_was_held() -> None:
    pieces, _ = run(["a", " ST", "<eos>"], [" STOP"], finish="stop")
    assert text_of(pieces) == "a ST"
    assert not pieces[-1].stopped_by_text


EMOJI = "\N{HUGGING FACE}".encode()
THIRDS = [EMOJI[:2], EMOJI[2:3], EMOJI[3:]]


@pytest.mark.parametrize("per_push", [1, 2, 5])
def test_characters_in_parts(per_push: int) -> None:
    """turboderp-org/exllamav3#171: parts of a character came out as U+FFFD."""
    pieces, _ = run(THIRDS * 5, [], per_push=per_push)
    assert text_of(pieces) == "\N{HUGGING FACE}" * 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)


def test_a_character_cut_at_the_end() -> None:
    pieces, _ = run([*THIRDS * 5, THIRDS[0]], [])
    assert text_of(pieces) == "\N{HUGGING FACE}" * 5 + "\N{REPLACEMENT CHARACTER}"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces[:-1])


def test_a_stop_of_characters_in_parts() -> None:
    pieces, output = run(THIRDS * 5, ["\N{HUGGING FACE}" * 2])
    assert text_of(pieces) == "" and output.finish == "stop"
    assert output.num_tokens == 6


def test_stop_strings_count_from_min_tokens() -> None:
    pieces, output = run(["x", "x", "x", "x"], ["x"], min_tokens=2)
    assert text_of(pieces) == "xx" and output.num_tokens == 3


def test_offsets_are_where_text_begins() -> None:
    pieces, _ = run(R3, ["L P Z"])
    offsets = [one.offset for piece in pieces for one in piece.tokens]
    assert offsets == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21]


def slow_cut(text: str, stops: list[str]) -> str:
    """Before the stop string that is complete first; the longest of several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


texts = st.text("ab", max_size=30)


@given(texts, st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.data())
def test_stop_strings_are_found_as_a_slow_search_finds_them(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Wherever the borders lie, nothing that goes out has to be taken back."""
    matcher, out, stopped, position = StopStrings(stops), "", False, 0
    expected = slow_cut(text, stops)
    while position < len(text) and not stopped:
        size = data.draw(st.integers(1, 7))
        free, stopped = matcher.push(text[position : position + size])
        position += size
        out += free
        assert expected.startswith(out)
    if not stopped:
        out += matcher.flush()
    assert out == expected
    assert stopped == (expected != text or any(text == stop for stop in stops))
