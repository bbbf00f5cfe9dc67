"""From prompts to answers: what a decode worker does with KV that came in and tokens it drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.incoming import Begin, BeginLocal
from decode_worker.scheduler import DecodeScheduler
from splitserve.request import SampledToken
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.prompt_clock import PromptClock
from splitserve.scheduling.sequence import (
    RequestKey,
    Sequence,
    first_rows,
    fork,
    take_row,
)
from splitserve.wire import messages as m


class BlockCopier(Protocol):
    """Whoever holds the KV memory."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...


@dataclass(slots=True)
class Answers:
    """Owns the rows of the current step, and how a prompt becomes its answers."""

    scheduler: DecodeScheduler
    copier: BlockCopier
    block_size: int
    clock: Callable[[], float]
    prompts: PromptClock = field(default_factory=PromptClock)
    rows: list[m.TokenRow] = field(default_factory=list)
    first_tokens: list[m.FirstToken] = field(default_factory=list)
    num_tokens_prefilled: int = 0
    num_tokens_decoded: int = 0
    num_prefix_queries: int = 0  # tokens of prompts that came to be decoded
    num_prefix_hits: int = 0  # of these, those that were cached

    def begin(self, begin: Begin, block_ids: list[int]) -> None:
        """All KV of a prompt is in `block_ids`: its choices go on from their first tokens."""
        prompt = self._prompt(begin, block_ids)
        prompt.num_computed = len(prompt.token_ids)
        prompt.keep_in(self.scheduler.cache)
        self.scheduler.cache.release(begin.request.key)
        self.prompts.arrived(begin.request.key, begin.whole_at)
        self._fork(prompt, begin.first_tokens)

    def begin_local(self, begin: BeginLocal) -> None:
        """This worker computes the prompt itself, behind what is cached."""
        prompt = self._prompt(begin, begin.block_ids)
        prompt.num_computed = prompt.num_cached
        self.scheduler.begin(prompt)

    def take(self, planned: Planned, tokens: tuple[SampledToken, ...]) -> None:
        """Count a computed chunk, and take the tokens it ended with."""
        sequence = planned.sequence
        if planned.samples and not sequence.is_prompt and planned.num_tokens == 1:
            self.num_tokens_decoded += 1
        else:
            self.num_tokens_prefilled += planned.num_tokens
        if planned.samples and sequence.is_prompt:
            self._prompt_done(sequence, tokens)
        elif planned.samples:
            sequence.append(tokens[0])
            self.rows.append(take_row(sequence))
            if self.rows[-1].finish is not None:
                self.scheduler.finish(sequence)

    def tokens(self, epoch: str) -> m.Tokens:
        """What the step made. With it, how handed-over requests came to the first one of theirs."""
        now = self.clock()
        begun = []
        for row in self.rows:
            key = RequestKey(row.request_id, row.attempt)
            if key in self.prompts:
                begun.append(m.Begun(*key, *self.prompts.finish(key, now)))
        return m.Tokens(epoch, tuple(self.rows), tuple(begun))

    def _prompt(self, begin: Begin | BeginLocal, block_ids: list[int]) -> Sequence:
        request, known = begin.request, begin.known
        prompt = Sequence(request, request.choices, list(request.token_ids), begin.order)
        prompt.num_cached, prompt.node = known.num_tokens, known.node
        self.num_prefix_queries += len(request.token_ids)
        self.num_prefix_hits += known.num_tokens
        own = len(request.token_ids) // self.block_size + 1
        prompt.block_ids, prompt.spare_block_ids = block_ids[:own], block_ids[own:]
        prompt.is_prompt = True
        return prompt

    def _prompt_done(self, prompt: Sequence, tokens: tuple[SampledToken, ...]) -> None:
        request = prompt.request
        rows = first_rows(prompt, tokens)
        times = self.prompts.finish(request.key, self.clock())
        first = m.FirstToken(*request.key, request.epoch, rows, *times, prompt.num_cached)
        self.first_tokens.append(first)
        self.scheduler.cache.release(request.key)
        unfinished = tuple(row for row in rows if row.finish is None)
        if unfinished:
            self.scheduler.take(prompt)
            self._fork(prompt, unfinished)
        else:
            self.scheduler.finish(prompt)

    def _fork(self, prompt: Sequence, rows: tuple[m.TokenRow, ...]) -> None:
        """One sequence for each row: an unfinished choice and its first token."""
        choices = {choice.choice_id: choice for choice in prompt.choices}
        first = [(choices[row.choice_id], _token_of(row)) for row in rows]
        forked = fork(prompt, first, self.block_size)
        self.copier.copy_blocks(forked.copies)
        for _ in forked.sequences[1:]:
            self.scheduler.blocks.fork(forked.shared)
        self.scheduler.blocks.free(forked.unused)
        for sequence in forked.sequences:
            self.scheduler.begin(sequence)


def _token_of(row: m.TokenRow) -> SampledToken:
    return SampledToken(row.tokens[0], row.logprobs[0] if row.logprobs else None)
