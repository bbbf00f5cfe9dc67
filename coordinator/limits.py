"""How large a request may be. Fixed once, by the first complete set of workers, and kept when
another coordinator takes over.

So a lone request always fits, and 'never room' is an answer at once instead of a wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.config import Promises, Role
from splitserve.errors import InvalidRequestError
from splitserve.wire.messages import WorkerFacts


@dataclass(frozen=True, slots=True)
class Limits(Promises):
    """What a request may be, and what a worker must be."""

    @classmethod
    def of(cls, promises: Promises) -> Limits:
        return cls(**dataclasses.asdict(promises))

    def resolve_max_tokens(self, num_prompt_tokens: int, asked: int | None, default: int) -> int:
        """The number of output tokens a request may have.

        What was asked for must fit; a default is cut to what fits. Raises InvalidRequestError.
        """
        self.check_prompt(num_prompt_tokens)
        room = self.max_total_tokens - num_prompt_tokens
        if asked is not None and asked > room:
            raise InvalidRequestError(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens {asked} are "
                f"{num_prompt_tokens + asked} together, the limit is {self.max_total_tokens}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return min(default, room) if asked is None else asked

    def check_prompt(self, num_tokens: int) -> None:
        """Raises InvalidRequestError when a prompt leaves no room for an answer."""
        most = min(self.max_prompt_tokens, self.max_total_tokens - 1)
        if num_tokens > most:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, the limit is {most}",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_choices(self, num_prompt_tokens: int, num_choices: int) -> None:
        """Raises InvalidRequestError when one prompt's choices can't run side by side."""
        most = min(self.max_choices, self.num_decode_blocks - num_prompt_tokens // self.block_size)
        if num_choices > most:
            raise InvalidRequestError(
                f"n is {num_choices}, the limit for this prompt is {most}", param="n"
            )

    def shortfall(self, role: Role, facts: WorkerFacts) -> str | None:
        """Why a worker is too small for what the cluster has promised; None when it isn't."""
        if role == "prefill":
            return _smaller("prompt tokens", _capacity(facts), self.max_prompt_tokens)
        return (
            _smaller("tokens of a sequence", _capacity(facts), self.max_total_tokens)
            or _smaller("blocks", facts.num_blocks, self.num_decode_blocks)
            or _smaller("sequences", facts.max_num_seqs, self.max_choices)
        )


def limits_of(
    prefill: Sequence[WorkerFacts], decode: Sequence[WorkerFacts], model_max_len: int
) -> Limits:
    """The limits of a set of workers, of which at least one decodes."""
    total = min([model_max_len, *map(_capacity, decode)])
    block_size = decode[0].layout.block_size
    max_choices = min(facts.max_num_seqs for facts in decode)
    most_blocks = -(-total // block_size) + max_choices  # more are never needed at the start
    return Limits(
        max_prompt_tokens=min([total - 1, *map(_capacity, prefill)]),
        max_total_tokens=total,
        max_choices=max_choices,
        num_decode_blocks=min([most_blocks, *(facts.num_blocks for facts in decode)]),
        block_size=block_size,
    )


def _capacity(facts: WorkerFacts) -> int:
    """Tokens of the longest sequence a worker can hold."""
    return min(facts.num_blocks * facts.layout.block_size, facts.max_model_len)


def _smaller(what: str, offered: int, promised: int) -> str | None:
    if offered >= promised:
        return None
    return f"it can take {offered} {what}, this cluster has promised {promised}"
