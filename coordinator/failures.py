"""What ends a request, or an attempt at it, in words for its client. Pure."""

from __future__ import annotations

from coordinator.registry import Worker
from coordinator.tracked import Leg, Tracked
from splitserve.errors import RequestFailedError, SplitserveError, UnavailableError
from splitserve.wire import messages as m

_STATUS_OF_STAGE = {"deadline": 504, "admission": 503}


def reported(worker: Worker, message: m.Failed) -> RequestFailedError:
    text = f"{worker.worker_id} failed in stage {message.stage}: {message.reason}"
    status = _STATUS_OF_STAGE.get(message.stage, 500)
    return RequestFailedError(text, stage=message.stage, status=status)


def died(worker: Worker, leg: Leg, reason: str) -> RequestFailedError:
    text = f"{worker.role} worker {worker.worker_id} died: {reason}"
    stage = "prefill" if worker.worker_id == leg.prefill_worker_id else "decode"
    return RequestFailedError(text, stage=stage, status=503)


def stopped(worker: Worker) -> RequestFailedError:
    return RequestFailedError(f"{worker.worker_id} was stopped", stage="internal", status=503)


def queue_full(worker: Worker) -> RequestFailedError:
    text = f"the message queue of {worker.worker_id} is full"
    return RequestFailedError(text, stage="admission", status=503)


def too_late(tracked: Tracked) -> RequestFailedError:
    served = any(leg.phases for leg in tracked.legs)
    where = "being served" if served else "waiting for a worker"
    text = f"the request took longer than {tracked.request.timeout_s:g} s, it was {where}"
    return RequestFailedError(text, stage="deadline", status=504)


def nobody_left(leg: Leg) -> SplitserveError:
    if not leg.lost_to:
        return UnavailableError("no decode worker is left")
    text = f"{leg.lost_to}; no decode worker is left to go on"
    return RequestFailedError(text, stage="decode", status=503)
