"""Requests that time themselves and ask the cluster for its own account of that time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.bench_http import post, target_of
from tests.cluster.harness import Body

FIRST_TOKEN = ("queue_s", "prefill_s", "delivery_s")  # add up to the time to the first token
HANDOFF = ("grant_wait_s", "transfer_s", "decode_wait_s", "first_step_s")  # and these to the gap


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: the cluster's account, and what its client measured, seconds."""

    timing: dict[str, Any]
    ttft_s: float
    gap_s: float  # between tokens 0 and 1

    def sum_of(self, parts: Sequence[str]) -> float:
        return float(sum(self.timing[part] for part in parts))


def ask_timed(base_url: str, bodies: Sequence[Body], concurrency: int = 1) -> list[Timed]:
    """Streamed completions of at least two tokens each, so many at a time. AssertionError unless
    all of them go well."""

    async def run() -> list[Timed]:
        slots = asyncio.Semaphore(concurrency)

        async def one(body: Body) -> Timed:
            async with slots:
                return await _ask(base_url, body)

        return list(await asyncio.gather(*map(one, bodies)))

    return asyncio.run(run())


async def _ask(base_url: str, body: Body) -> Timed:
    always = {"stream": True, "return_timing": True, "return_token_ids": True, "ignore_eos": True}
    target = target_of(base_url, "/v1/completions", api_key=None)
    reply = await post(target, {"temperature": 0, **always, **body}, timeout_s=600.0)
    assert reply.status == 200, b"".join(data for _, data in reply.parts)
    (first_at, first), (second_at, _) = reply.parts[:2]
    assert first.count(b"data: ") == 1, "tokens 0 and 1 came together"
    lines = b"".join(data for _, data in reply.parts).splitlines()
    assert lines[-2] == b"data: [DONE]"
    (timing,) = (json.loads(line[6:])["timing"] for line in lines if b'"timing"' in line)
    return Timed(timing, first_at - reply.sent_at, second_at - first_at)
