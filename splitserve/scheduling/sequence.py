"""A prompt as a worker sees it, and one growing answer to it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from splitserve.request import Choice, SampledToken, Sampling, TokenRow
from splitserve.scheduling.finish import finish_reason
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.prefix_tree import PrefixNode

MAX_WAIT_S = 86400.0  # what a message asks beyond that is taken for nonsense


class RequestKey(NamedTuple):
    """One try at one prompt."""

    request_id: str
    attempt: int


class Asked(Protocol):
    """A message that asks for an answer: Prefill, or Open on the data channel."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def epoch(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def choices(self) -> tuple[Choice, ...]: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def stall_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Request:
    """What a worker was asked to do. Never changes.

    `token_ids` is the prompt (`num_prompt_tokens` long) and any output delivered before.
    `deadline` is on the worker's monotonic clock.
    """

    key: RequestKey
    epoch: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    choices: tuple[Choice, ...]
    sampling: Sampling
    deadline: float
    stall_timeout_s: float

    @classmethod
    def of(cls, message: Asked, now: float) -> Request:
        return cls(
            RequestKey(message.request_id, message.attempt),
            message.epoch,
            message.token_ids,
            message.num_prompt_tokens,
            message.choices,
            message.sampling,
            now + min(message.deadline_s, MAX_WAIT_S),
            min(message.stall_timeout_s, MAX_WAIT_S),
        )

    def at_attempt(self, attempt: int) -> Request:
        """The same prompt as another attempt."""
        return replace(self, key=self.key._replace(attempt=attempt))


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing row of tokens and the blocks that hold its KV.

    Until the first token a prompt is one sequence for all its choices (`is_prompt`); then each
    choice goes its own way.
    `order` is its age: smaller is older. `node` is how far its blocks are known to the prefix
    cache; a fork goes on from its prompt's. `unreported` are sampled tokens the coordinator has not
    been told with a `Tokens` row.
    """

    request: Request
    choices: tuple[Choice, ...]
    token_ids: list[int]
    order: int
    block_ids: list[int] = field(default_factory=list)
    spare_block_ids: list[int] = field(default_factory=list)  # for the forks to come
    num_computed: int = 0
    num_cached: int = 0  # of its prompt's tokens, that were neither computed nor received for it
    node: PrefixNode | None = None
    is_prompt: bool = False
    unreported: list[SampledToken] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def keep_in(self, cache: PrefixCache) -> None:
        """What is computed may be reused, as far as blocks are full."""
        if self.node is not None:
            self.node = cache.insert(self.node, self.token_ids, self.block_ids, self.num_computed)

    def append(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)
        self.unreported.append(token)


def impossible(request: Request, max_model_len: int, vocab_size: int) -> str | None:
    """Why the request could never be served here, by its numbers."""
    num_tokens = len(request.token_ids)
    choice_ids = [choice.choice_id for choice in request.choices]
    if not choice_ids or len(set(choice_ids)) != len(choice_ids):
        return f"choice ids {choice_ids[:10]} are none, or not distinct"
    if not 0 < request.num_prompt_tokens <= num_tokens < max_model_len:
        return f"{num_tokens} tokens do not fit in max_model_len {max_model_len}"
    token_ids = [*request.token_ids, *(token_id for token_id, _ in request.sampling.logit_bias)]
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return f"a token id is outside the vocabulary of {vocab_size}"
    return None


def blocks_to_begin(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks that let a prompt's choices each take one more token.

    Full blocks are shared; behind them each choice has one block of its own.
    """
    return num_tokens // block_size + num_choices


class Forked(NamedTuple):
    """What a prompt became: its sequences, and what the block owner has to do for them."""

    sequences: list[Sequence]
    copies: list[tuple[int, int]]  # block copies to make before the next step (from, to)
    shared: list[int]  # full blocks: one more reference for each sequence but the first
    unused: list[int]  # blocks of choices that ended with their first token


def fork(
    prompt: Sequence, first: SequenceOf[tuple[Choice, SampledToken]], block_size: int
) -> Forked:
    """One sequence for each (choice, first token), sharing the prompt's full blocks.

        prompt  [full][full][half]  spare [ ][ ]
        first   [full][full][half]                    the block itself
        second  [full][full]        [half]            copied, where it holds tokens
        third   [full][full]           [half]

    `prompt` has all its KV. `first` holds at least one choice.
    """
    num_tokens = len(prompt.token_ids)
    shared = prompt.block_ids[: num_tokens // block_size]
    own = [*prompt.block_ids[len(shared) :], *prompt.spare_block_ids]
    sequences = []
    for (choice, token), block_id in zip(first, own, strict=False):
        sequence = Sequence(prompt.request, (choice,), list(prompt.token_ids), prompt.order)
        sequence.block_ids = [*shared, block_id]
        sequence.num_computed, sequence.node = num_tokens, prompt.node
        sequence.append(token)
        sequences.append(sequence)
    assert len(sequences) == len(first), "a choice has no block"
    copies = [(own[0], block_id) for block_id in own[1 : len(sequences)]]
    return Forked(
        sequences, copies if num_tokens % block_size else [], shared, own[len(sequences) :]
    )


def first_rows(prompt: Sequence, tokens: SequenceOf[SampledToken]) -> tuple[TokenRow, ...]:
    """The first token of each choice of a prompt, in order of its choices, as rows."""
    request = prompt.request
    index = prompt.num_output_tokens
    return tuple(
        TokenRow(
            *request.key,
            choice.choice_id,
            index,
            (token.token_id,),
            None if token.logprobs is None else (token.logprobs,),
            finish_reason(request.sampling, token.token_id, index + 1),
        )
        for choice, token in zip(prompt.choices, tokens, strict=True)
    )


def take_row(sequence: Sequence) -> TokenRow:
    """All unreported tokens of an answer as a row; from now on they count as reported."""
    tokens, sequence.unreported = sequence.unreported, []
    logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return TokenRow(
        *sequence.request.key,
        sequence.choices[0].choice_id,
        sequence.num_output_tokens - len(tokens),
        tuple(token.token_id for token in tokens),
        logprobs or None,
        finish_reason(
            sequence.request.sampling, sequence.token_ids[-1], sequence.num_output_tokens
        ),
    )
