"""What the coordinator sends right behind its Welcome reaches the worker's loop."""

from __future__ import annotations

from splitserve.request import Choice, Sampling
from splitserve.wire import messages as m
from splitserve.wire.channel import ControlReceived
from tests.unit.test_membership import FACTS, member
from tests.unit.wire.channels import raw_router


def test_a_prompt_that_comes_with_the_welcome_is_not_lost() -> None:
    """ai-dynamo/dynamo PR#7795: first requests to a worker that had just registered were lost.

    Under load the coordinator has work for a new worker in the moment it welcomes it.
    """
    prefill = m.Prefill("r", 0, "epoch", (1, 2), 2, (Choice(0, 1),), Sampling(4), 60.0, 10.0)
    with raw_router() as (_, endpoint), member(endpoint) as membership:
        for message in (m.Welcome("epoch"), prefill):
            membership._channel.post(ControlReceived(message, at=0.0))
        membership.join(FACTS)
        assert membership.receive(1.0) == [ControlReceived(prefill, at=0.0)]
