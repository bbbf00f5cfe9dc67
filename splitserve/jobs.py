"""Many prompts in the background: a bounded number at a time, results in order, cancellable."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from splitserve.answers import Answer
from splitserve.calls import TIMEOUT_S, Prompt
from splitserve.errors import OverloadedError

if TYPE_CHECKING:
    from splitserve.async_client import AsyncClient

Status = Literal["running", "done", "failed", "cancelled"]
_CANCEL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. Failed prompts are not among those done."""

    num_total: int
    num_done: int
    num_failed: int


class _Batch:
    """Owns the outcomes of a job's prompts, one future each, filled in any order.

    The futures are thread-safe, so both kinds of job read the same ones.
    """

    def __init__(
        self, prompts: Sequence[Prompt], concurrency: int, options: Mapping[str, Any]
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._prompts = prompts
        self._concurrency = concurrency
        self._options = options
        self.outcomes: list[Future[Answer]] = [Future() for _ in prompts]

    async def run(self, client: AsyncClient) -> None:
        """Fill every outcome, unless this is cancelled: then call `end_rest`."""
        pending = iter(range(len(self._prompts)))

        async def work() -> None:
            for index in pending:
                await self._fill(client, index)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(self._prompts))):
                group.create_task(work())

    def end_rest(self, error: BaseException | None = None) -> None:
        """Nothing fills outcomes any more: the open ones get this error, or are cancelled."""
        for outcome in self.outcomes:
            if outcome.done():
                continue
            if error is None:
                outcome.cancel()
            else:
                outcome.set_exception(error)

    async def _fill(self, client: AsyncClient, index: int) -> None:
        outcome = self.outcomes[index]
        try:
            outcome.set_result(await self._generate(client, self._prompts[index]))
        except Exception as error:  # the caller gets it, from results()
            outcome.set_exception(error)

    async def _generate(self, client: AsyncClient, prompt: Prompt) -> Answer:
        give_up_at = time.monotonic() + TIMEOUT_S
        while True:
            try:
                answer: Answer = await client.generate(prompt, **self._options)
                return answer
            except OverloadedError as error:
                if time.monotonic() + error.retry_after_s > give_up_at:
                    raise
                await asyncio.sleep(error.retry_after_s)  # as the server asked

    def progress(self) -> Progress:
        filled = [
            outcome for outcome in self.outcomes if outcome.done() and not outcome.cancelled()
        ]
        num_failed = sum(outcome.exception() is not None for outcome in filled)
        return Progress(len(self.outcomes), len(filled) - num_failed, num_failed)

    def status(self) -> Status:
        if any(outcome.cancelled() for outcome in self.outcomes):
            return "cancelled"
        if not all(outcome.done() for outcome in self.outcomes):
            return "running"
        return "failed" if self.progress().num_failed else "done"


class AsyncJob:
    """Prompts being answered in the running event loop."""

    def __init__(
        self,
        client: AsyncClient,
        prompts: Sequence[Prompt],
        concurrency: int,
        options: Mapping[str, Any],
    ) -> None:
        self._batch = _Batch(prompts, concurrency, options)
        self._task = asyncio.create_task(self._batch.run(client))
        self._task.add_done_callback(self._ended)

    @property
    def status(self) -> Status:
        return self._batch.status()

    @property
    def progress(self) -> Progress:
        return self._batch.progress()

    async def results(self) -> AsyncIterator[Answer]:
        """Answers in the order of the prompts, each as soon as it and those before are there.

        Raises a failed prompt's exception in its turn; asyncio.CancelledError after `cancel`.
        """
        for outcome in self._batch.outcomes:
            yield await asyncio.shield(asyncio.wrap_future(outcome))

    async def cancel(self) -> None:
        """Stop: what is in flight is cancelled on the server too. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=_CANCEL_TIMEOUT_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._batch.end_rest(None if task.cancelled() else task.exception())


class Job:
    """Prompts being answered by a thread of this object."""

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        prompts: Sequence[Prompt],
        concurrency: int,
        options: Mapping[str, Any],
    ) -> None:
        self._batch = _Batch(prompts, concurrency, options)
        self._connect = connect
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._main())
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        return self._batch.status()

    @property
    def progress(self) -> Progress:
        return self._batch.progress()

    def results(self, timeout_s: float | None = None) -> Iterator[Answer]:
        """Answers in the order of the prompts, each as soon as it and those before are there.

        Raises a failed prompt's exception in its turn, TimeoutError when the next answer takes
        longer than `timeout_s`, and concurrent.futures.CancelledError after `cancel`.
        """
        for outcome in self._batch.outcomes:
            yield outcome.result(timeout_s)

    def wait(self, timeout_s: float | None = None) -> Status:
        """Wait for the end, at most so long; the status then."""
        self._thread.join(timeout_s)
        return self.status

    def cancel(self) -> None:
        """Stop: what is in flight is cancelled on the server too. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CANCEL_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass  # told by the status
        except Exception as error:  # no prompt's own: the caller gets it, from results()
            self._batch.end_rest(error)
        finally:
            self._batch.end_rest()
            self._loop.close()

    async def _main(self) -> None:
        async with self._connect() as client:
            await self._batch.run(client)
