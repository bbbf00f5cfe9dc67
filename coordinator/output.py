"""From a choice's tokens to its text: detokenizer, stop strings, where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.stop_strings import StopStrings
from splitserve.request import FinishReason, SampledToken


class Detokenizer(Protocol):
    """Text of one answer, token by token."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the answer; `offset` is where its text begins, in characters of the answer."""

    token: SampledToken
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delivery adds to a choice. `text` may lag behind the tokens: parts of characters
    and of possible stop strings are held back."""

    choice_id: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None = None
    stopped_by_text: bool = False  # by a stop string; workers don't know of it yet


class ChoiceOutput:
    """Owns the text of one choice.

    Tokens come in order and once (coordinator/token_order.py). Stop strings are looked for in
    what follows the first `min_tokens` tokens, as vLLM does.
    """

    def __init__(
        self, choice_id: int, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self.num_tokens = 0  # of the answer: those past a stop string don't count
        self.finish: FinishReason | None = None
        self._choice_id = choice_id
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_characters = 0  # of all text made so far, held or not

    def push(self, tokens: Sequence[SampledToken], finish: FinishReason | None) -> Piece:
        """The next tokens; `finish` when workers ended the choice with the last of them."""
        assert self.finish is None, "tokens behind the end"
        texts: list[str] = []
        taken: list[OutputToken] = []
        for position, token in enumerate(tokens):
            is_last = finish is not None and position == len(tokens) - 1
            taken.append(OutputToken(token, self._num_characters))
            self.num_tokens += 1
            # The token that stops an answer (EOS, a stop id) is not part of its text.
            text = "" if is_last and finish == "stop" else self._detokenizer.push(token.token_id)
            if is_last:
                text += self._detokenizer.flush()
            free, stopped = self._look_for_stop(text)
            texts.append(free)
            if stopped:
                return self._end("".join(texts), taken, "stop", stopped_by_text=True)
        if finish is not None:
            texts.append(self._stops.flush())
            return self._end("".join(texts), taken, finish, stopped_by_text=False)
        return Piece(self._choice_id, "".join(texts), tuple(taken))

    def _look_for_stop(self, text: str) -> tuple[str, bool]:
        self._num_characters += len(text)
        if self.num_tokens <= self._min_tokens:
            return text, False
        return self._stops.push(text)

    def _end(
        self, text: str, tokens: list[OutputToken], finish: FinishReason, *, stopped_by_text: bool
    ) -> Piece:
        self.finish = finish
        return Piece(self._choice_id, text, tuple(tokens), finish, stopped_by_text)
