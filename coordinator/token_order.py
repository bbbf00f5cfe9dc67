"""Puts the output tokens of one choice in order: each index once, whoever sent it first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from splitserve.request import FinishReason, SampledToken
from splitserve.wire.messages import TokenRow


class Ordered(NamedTuple):
    """Tokens that can be delivered now; `finish` when the last of them ends the choice."""

    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None


@dataclass(slots=True)
class TokenOrder:
    """Owns which indices of a choice were delivered and which came early.

    Tokens reach us from two workers on two sockets: the decode worker's first row may overtake
    the prefill worker's first token, and it repeats that token.
    """

    max_tokens: int
    num_delivered: int = 0
    finished: bool = False  # the token that ends the choice was delivered
    _early: dict[int, SampledToken] = field(default_factory=dict)
    _end: tuple[int, FinishReason] | None = None  # (number of tokens, why)

    def take(self, row: TokenRow) -> Ordered:
        """What a row lets through. Tokens that are behind, doubled or past the limit are dropped.

        A token that was delivered is never changed, whatever comes later for its index.
        """
        if self.finished:
            return Ordered((), None)
        logprobs = row.logprobs or (None,) * len(row.tokens)
        for index, (token_id, entry) in enumerate(
            zip(row.tokens, logprobs, strict=False), start=row.first_index
        ):
            if self.num_delivered <= index < self.max_tokens:
                self._early.setdefault(index, SampledToken(token_id, entry))
        if row.finish is not None and self._end is None:
            self._end = (row.first_index + len(row.tokens), row.finish)
        return self._deliverable()

    def restarted(self) -> TokenOrder:
        """This choice as its next attempt begins: what came early is to be made again."""
        return TokenOrder(self.max_tokens, self.num_delivered)

    def _deliverable(self) -> Ordered:
        tokens = []
        end, reason = self._end or (self.max_tokens, None)
        while self.num_delivered < end and self.num_delivered in self._early:
            tokens.append(self._early.pop(self.num_delivered))
            self.num_delivered += 1
        self.finished = self._end is not None and self.num_delivered >= end
        return Ordered(tuple(tokens), reason if self.finished else None)
