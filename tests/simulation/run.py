"""One seed: a cluster comes up, is struck for a while, is left alone, and has to be at rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.tracked import MAX_FAILURES
from tests.simulation.chaos import Chaos, draw_chaos, draw_shape
from tests.simulation.clients import Asked
from tests.simulation.cluster import Cluster
from tests.simulation.world import START_S, SimulationError, World

GENTLE_SHARE = 0.4  # of the seeds
STRUCK_S = 15.0
REST_S = 150.0  # by then everything has ended, and every worker is back
QUIET_S = 5.0
# What breaks is felt for a while: a worker is missed, is started again, transfers stall.
FELT_S = 15.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a seed whose every property held."""

    seed: int
    is_gentle: bool
    verdicts: Counter[str]
    strikes: Counter[str]
    errors: tuple[str, ...]
    num_events: int


def run_seed(seed: int, show: Callable[[str], None] | None = None) -> Outcome:
    """Raises whatever broke, with the seed in its text."""
    world = World(seed, show)
    try:
        return _run(world, seed)
    except BaseException as error:
        moment = f"seed {seed}, {world.now - START_S:.4f} s"
        error.add_note(f"{moment}: `python -m tests.simulation {seed}` shows how it came to this")
        raise


def _run(world: World, seed: int) -> Outcome:
    is_gentle = world.chance.random() < GENTLE_SHARE
    cluster = Cluster(world, draw_shape(world, is_gentle=is_gentle))
    chaos = draw_chaos(world, cluster, is_gentle=is_gentle)
    chaos.begin()
    cluster.run_for(STRUCK_S)
    chaos.end()
    _come_to_rest(cluster)
    errors = [asked for asked in cluster.clients.all if asked.error]
    _explain(chaos, errors)
    ended = len(cluster.clients.all) - len(errors)
    verdicts = Counter(right=ended, failed=len(errors), refused=len(cluster.clients.refusals))
    texts = tuple(asked.error for asked in errors)
    return Outcome(seed, is_gentle, verdicts, chaos.counts, texts, world.num_events)


def _come_to_rest(cluster: Cluster) -> None:
    """And stay there."""
    until = cluster.world.now + REST_S
    cluster.run_for(1.0)
    while (unrest := cluster.unrest()) and cluster.world.now < until:
        cluster.run_for(1.0)
    if not unrest:
        cluster.run_for(QUIET_S)
        unrest = cluster.unrest()
    if unrest:
        raise SimulationError(f"no rest: {'; '.join(unrest)}")


def _explain(chaos: Chaos, errors: list[Asked]) -> None:
    """Nothing fails, and nothing is refused, unless something was broken shortly before."""
    for asked in errors:
        name = asked.request.request_id
        assert asked.ended_at is not None
        if "took longer" in asked.error:  # a lost message may hold up all who wait behind it
            if not any(x.request_id and x.at <= asked.ended_at for x in chaos.hard):
                raise SimulationError(f"{name} was forgotten: {asked.error}")
            continue
        num_losses = sum(strike.request_id == name for strike in chaos.hard)
        broken = _is_felt(chaos, asked.asked_at, asked.ended_at)
        if not broken and num_losses < MAX_FAILURES:
            moment = asked.ended_at - START_S
            raise SimulationError(f"{name} failed for nothing at {moment:.4f}: {asked.error}")
    for moment, reason in chaos.cluster.clients.refusals:
        if not _is_felt(chaos, moment, moment):
            raise SimulationError(f"refused for nothing at {moment - START_S:.4f}: {reason}")


def _is_felt(chaos: Chaos, start: float, end: float) -> bool:
    """Whether something broke for everybody, then or not long before."""
    moments = [strike.at for strike in chaos.hard if not strike.request_id]
    return any(start - FELT_S <= moment <= end for moment in moments)
