"""Finds stop strings in text that comes in pieces, and never lets the beginning of one out.

One automaton (Knuth, Morris and Pratt, 1977) a stop string: its state is how many characters of
the stop string the text ends with at present. So a piece costs its own length, and where the
tokens' borders lie changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Owns the text that may yet turn out to be the beginning of a stop string.

    The match that is complete first wins; of several complete at one character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may go out, whether a stop string ended it)."""
        if not self._stops:
            return text, False
        for position, character in enumerate(text):
            matched = self._step(character)
            if matched:
                all_text = self._held + text[: position + 1]
                self._held = ""
                return all_text[: len(all_text) - matched], True
        all_text = self._held + text
        num_free = len(all_text) - max(self._states)
        self._held = all_text[num_free:]
        return all_text[:num_free], False

    def flush(self) -> str:
        """The held text, at the end of the answer: it was no stop string after all."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> int:
        """Take one character; the length of the longest stop string it completes, or 0."""
        matched = 0
        for i, stop in enumerate(self._stops):
            state, borders = self._states[i], self._borders[i]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            self._states[i] = state
            if state == len(stop):
                matched = max(matched, state)
        return matched


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that also ends it."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
