"""Well-formed messages that make no sense, from members and strangers: the state goes on."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from splitserve.wire import messages as m
from tests.unit.coordinator.world import EPOCH, World, request
from tests.unit.wire.noise import noise

SENDERS = st.sampled_from(
    ["p0", "d0", "d1", "launcher", "stranger", "p0/heartbeat", "d1/heartbeat", ""]
)
ROWS = st.lists(
    noise(
        m.TokenRow,
        request_id=st.just("r"),
        attempt=st.integers(0, 1),
        choice_id=st.integers(0, 3),
        first_index=st.integers(0, 12),
    ),
    max_size=3,
).map(tuple)
SAID = noise(
    m.ToCoordinator,
    request_id=st.sampled_from(["r", "r.0", "r.1"]),
    attempt=st.integers(0, 2),
    epoch=st.just(EPOCH),
    worker_id=st.sampled_from(["p0", "d0", "d1", "launcher", "new"]),
    launch_id=st.sampled_from(["p0", "d0", "decode-0", "prefill-1", "x", "-", "decode-"]),
    role=st.sampled_from(["prefill", "decode", "launcher"]),
    rows=ROWS,
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.lists(st.tuples(SENDERS, SAID), max_size=12))
def test_whatever_is_said_the_state_goes_on(said: list[tuple[str, m.ToCoordinator]]) -> None:
    """Each request still ends once, and another one after it."""
    world = World(1, 2)
    actions = world.submit(request(num_choices=2))
    for sender, message in said:
        actions += world.hear(sender, message)
        due = world.state.due()
        assert due is None or due >= world.now - 600
    actions += world.wait(601.0, beating=False)
    ends = [action for action in actions if type(action).__name__ in ("Finish", "Fail")]
    assert len(ends) == 1
    assert world.at_rest()
