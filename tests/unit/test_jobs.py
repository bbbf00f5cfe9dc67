from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from splitserve import AsyncClient, Client
from splitserve.errors import InvalidRequestError, UnavailableError
from splitserve.jobs import Job
from tests.unit.scripted_server import Exchange, ScriptedServer, completion, scripted_server
from tests.waiting import wait_until


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.base_url) as connected:
        yield connected


def test_job_answers_in_order_with_bounded_concurrency(
    client: Client, server: ScriptedServer
) -> None:
    def later_first(exchange: Exchange) -> None:
        time.sleep(0.02 if exchange.body["prompt"].endswith("0") else 0.0)
        completion(exchange)

    server.handler = later_first
    job = client.submit([f"prompt {i}" for i in range(25)], concurrency=4, max_tokens=1)
    texts = [answer.text for answer in job.results(timeout_s=10)]
    assert texts == [f"prompt {i}" for i in range(25)]
    assert job.wait(5) == job.status == "done"
    assert (job.progress.num_done, job.progress.num_failed, job.progress.num_total) == (25, 0, 25)
    assert 1 < server.most_open <= 4


def test_job_waits_when_told_to_and_reports_failures_in_their_turn(
    client: Client, server: ScriptedServer
) -> None:
    refused: list[str] = []

    def moody(exchange: Exchange) -> None:
        prompt = exchange.body["prompt"]
        if prompt == "a" and not refused:
            refused.append(prompt)
            exchange.json({"error": {"message": "full"}}, 429, {"retry-after": "0.05"})
        elif prompt == "b":
            exchange.json({"error": {"message": "b is too long"}}, 400)
        else:
            completion(exchange)

    server.handler = moody
    job = client.submit(["a", "b", "c"])
    assert job.wait(10) == "failed"
    assert (job.progress.num_done, job.progress.num_failed) == (2, 1)
    results = job.results()
    assert next(results).text == "a"
    with pytest.raises(InvalidRequestError, match="b is too long"):
        next(results)


def test_cancelled_job_hangs_up(client: Client, server: ScriptedServer) -> None:
    hung_up = threading.Event()

    def endless(exchange: Exchange) -> None:
        if exchange.body["prompt"] == "quick":
            completion(exchange)
            return
        exchange.start_stream()
        if exchange.wait_for_hang_up():
            hung_up.set()

    server.handler = endless
    job = client.submit(["quick", "slow", "never sent"], concurrency=1)
    results = job.results(timeout_s=5)
    assert next(results).text == "quick"
    wait_until(lambda: len(server.exchanges) == 2, 10, "second request")
    assert job.wait(0.0) == "running"
    job.cancel()
    assert hung_up.wait(5)
    assert job.wait() == "cancelled"
    with pytest.raises(CancelledError):
        next(results)
    job.cancel()
    assert len(server.exchanges) == 2


def test_a_job_that_can_not_connect_says_why() -> None:
    def connect() -> AsyncClient:
        raise UnavailableError("no route")

    job = Job(connect, ["a", "b"], concurrency=1, options={})
    assert job.wait(5) == "failed"
    assert job.progress.num_failed == 2
    with pytest.raises(UnavailableError, match="no route"):
        next(job.results(timeout_s=5))


def test_async_job_outlives_an_impatient_reader_and_can_be_cancelled(
    server: ScriptedServer,
) -> None:
    release = threading.Event()

    def slow(exchange: Exchange) -> None:
        release.wait(5)
        completion(exchange)

    server.handler = slow

    async def main() -> None:
        async with AsyncClient(server.base_url) as client:
            job = client.submit(["a"])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(job.results()), 0.05)
            release.set()
            assert [answer.text async for answer in job.results()] == ["a"]
            release.clear()
            other = client.submit(["b"])
            await other.cancel()
            assert other.status == "cancelled"
            release.set()

    asyncio.run(main())
