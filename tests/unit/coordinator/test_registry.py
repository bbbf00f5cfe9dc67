from __future__ import annotations

from splitserve.config import Liveness
from tests.unit.coordinator.world import World


def test_a_step_may_last_as_long_as_the_cluster_was_told() -> None:
    for limit_s, dead in ((60.0, []), (5.0, ["d0"])):
        world = World(liveness=Liveness(max_step_s=limit_s))
        world.beat("d0", loop_age_s=6.0)
        silent = world.state.registry.silent(world.now)
        assert [worker.worker_id for worker, _ in silent] == dead
