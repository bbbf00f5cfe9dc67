"""Any order of events: each request ends once, each token comes once, and nothing leaks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.events import Action, ChoiceStopped, Deliver, Fail, Finish, RequestCancelled, Send
from splitserve.errors import OverloadedError, UnavailableError
from splitserve.scheduling.finish import finish_reason
from splitserve.wire import messages as m
from tests.unit.coordinator.world import EPOCH, TIMES, World, request

BLOCK_SIZE = 16
TIMEOUT_S = 40.0


class _Job:
    """A request as the workers that were given it see it."""

    def __init__(self, prefill: m.Prefill, prefiller: str) -> None:
        self.prefill = prefill
        self.prefiller = prefiller
        self.decoder = prefill.decode_worker_id or prefiller
        self.computed = False
        self.at_prefill = True
        self.at_decode = prefill.decode_worker_id is None
        self.attempt = prefill.attempt
        self.rewind()

    def rewind(self) -> None:
        """From the first token on, as whoever decodes sees it."""
        first = len(self.prefill.token_ids) - self.prefill.num_prompt_tokens
        self.num_tokens = {choice.choice_id: first for choice in self.prefill.choices}
        self.done: set[int] = set()

    def next_row(self, choice_id: int, num_tokens: int) -> m.TokenRow:
        first = self.num_tokens[choice_id]
        tokens: list[int] = []
        finish = None
        while len(tokens) < num_tokens and finish is None:
            tokens.append(token_at(self.prefill.request_id, choice_id, first + len(tokens)))
            finish = finish_reason(self.prefill.sampling, tokens[-1], first + len(tokens))
        self.num_tokens[choice_id] += len(tokens)
        if finish:
            self.done.add(choice_id)
        rid = self.prefill.request_id
        return m.TokenRow(rid, self.attempt, choice_id, first, tuple(tokens), None, finish)


def token_at(request_id: str, choice_id: int, index: int) -> int:
    """The right token: a function of its place, so that a wrong delivery shows."""
    return int(request_id[1:].partition(".")[0]) * 1000 + choice_id * 100 + index


class CoordinatorMachine(RuleBasedStateMachine):
    """Clients, workers and time act at random; workers keep to the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            2, 2, max_queue=6, workers={"max_num_seqs": 3, "max_num_batched_tokens": 24}
        )
        self.jobs: dict[str, _Job] = {}
        self.delivered: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.asked: dict[str, Any] = {}
        self.ended: dict[str, str] = {}
        self.num_joined = 0
        self.held_rows: list[tuple[str, m.TokenRow]] = []

    # -- clients ------------------------------------------------------------------------------

    @rule(
        forms=st.lists(
            st.fixed_dictionaries(
                {
                    "num_tokens": st.integers(1, 60),
                    "num_choices": st.integers(1, 2),
                    "max_tokens": st.integers(1, 5),
                    "priority": st.integers(-1, 1),
                    "wants_timing": st.booleans(),
                }
            ),
            min_size=1,
            max_size=5,
        )
    )
    def submit(self, forms: list[dict[str, Any]]) -> None:
        """One call with several prompts."""
        start = len(self.asked)
        new = [request(f"r{i}", timeout_s=TIMEOUT_S, **form) for i, form in enumerate(forms, start)]
        try:
            actions = self.world.submit(*new)
        except (OverloadedError, UnavailableError):
            known = self.world.state.requests.ids
            assert not {one.request_id for one in new} & set(known), "all or none"
            return
        self.asked |= {one.request_id: one for one in new}
        self.carry_out(actions)

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        if open_requests := self.open:
            name = data.draw(st.sampled_from(open_requests))
            self.ended[name] = "cancelled"
            self.carry_out(self.world.handle(RequestCancelled(name)))

    @rule(data=st.data())
    def stop_by_text(self, data: st.DataObject) -> None:
        if open_requests := self.open:
            name = data.draw(st.sampled_from(open_requests))
            choice = data.draw(st.sampled_from(self.asked[name].choices))
            self.carry_out(self.world.handle(ChoiceStopped(name, choice.choice_id)))

    # -- workers ------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 4))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Prompts are done; what goes on is in the decode workers' hands."""
        for _ in range(count):
            self.compute_one(data)

    def compute_one(self, data: st.DataObject) -> None:
        names = [n for n, job in self.jobs.items() if job.at_prefill and not job.computed]
        if names:
            job = self.jobs[data.draw(st.sampled_from(names))]
            job.computed = True
            rows = tuple(job.next_row(choice, 1) for choice in job.num_tokens)
            name = job.prefill.request_id
            self.say(job.prefiller, m.FirstToken(name, job.attempt, EPOCH, rows, 0.1, 0.1))
            if len(job.done) < len(job.num_tokens):
                job.at_decode = True
            if job.prefill.decode_worker_id is None:
                job.at_prefill = False

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        names = [n for n, job in self.jobs.items() if job.computed and job.at_prefill]
        if names:
            job = self.jobs[data.draw(st.sampled_from(names))]
            job.at_prefill = False
            self.say(
                job.prefiller, m.HandedOver(job.prefill.request_id, job.attempt, EPOCH, 1, TIMES)
            )

    @rule(data=st.data(), count=st.integers(1, 6))
    def decode(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.decode_one(
                data,
                data.draw(st.integers(1, 3)),
                data.draw(st.booleans()),
                data.draw(st.booleans()),
            )

    def decode_one(self, data: st.DataObject, num_tokens: int, repeat: bool, hold: bool) -> None:
        """A row, perhaps twice, perhaps behind a later one."""
        jobs = [j for j in self.jobs.values() if j.at_decode and j.computed]
        choices = [(j, c) for j in jobs for c in j.num_tokens if c not in j.done]
        if not choices:
            return
        job, choice_id = data.draw(st.sampled_from(choices))
        row = job.next_row(choice_id, num_tokens)
        if hold:
            self.held_rows.append((job.decoder, row))
            return
        self.say(job.decoder, m.Tokens(EPOCH, (row, row) if repeat else (row,)))

    @rule()
    def let_held_rows_go(self) -> None:
        rows, self.held_rows = self.held_rows, []
        for worker_id, row in reversed(rows):
            self.say(worker_id, m.Tokens(EPOCH, (row,)))

    @rule(
        data=st.data(),
        stage=st.sampled_from(["prefill", "transfer", "decode"]),
        luck=st.integers(0, 3),
        kept=st.booleans(),
    )
    def fail(self, data: st.DataObject, stage: m.Stage, luck: int, kept: bool) -> None:
        if self.jobs and not luck:
            job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
            worker = job.prefiller if job.at_prefill else job.decoder
            name = job.prefill.request_id
            kept = kept and job.at_prefill and stage == "transfer"
            if kept:
                job.at_decode = False
            else:
                self.jobs.pop(name)
            failed = m.Failed(name, job.attempt, EPOCH, stage, "a fault", True, kept)
            self.say(worker, failed)

    @rule(data=st.data(), luck=st.integers(0, 5))
    def die(self, data: st.DataObject, luck: int) -> None:
        alive = self.world.state.registry.alive()
        if len(alive) > 1 and not luck:
            worker = data.draw(st.sampled_from(alive))
            exited = m.ProcessExited(worker.launch_id, 7, -9, "")
            for name, job in list(self.jobs.items()):
                if worker.worker_id == job.decoder:
                    job.at_decode = False
                if worker.worker_id == job.prefiller:
                    job.at_prefill = False
                if not job.at_prefill and not job.at_decode:
                    self.jobs.pop(name)
            self.carry_out(self.world.hear("launcher", exited))

    @rule(role=st.sampled_from(["prefill", "decode"]))
    def join(self, role: Any) -> None:
        if len(self.world.state.registry.alive()) < 5:
            self.num_joined += 1
            changes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24}
            self.carry_out(self.world.join(role, f"{role}-{self.num_joined}", **changes))

    @rule(seconds=st.floats(0.0, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.carry_out(self.world.wait(seconds))

    # -- what follows -------------------------------------------------------------------------

    @property
    def open(self) -> list[str]:
        return [name for name in self.asked if name not in self.ended]

    def say(self, worker_id: str, message: m.ToCoordinator) -> None:
        self.carry_out(self.world.hear(worker_id, message))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(identity, m.Prefill() as prefill):
                    assert prefill.request_id.partition(".")[0] not in self.ended
                    self.check_history(prefill)
                    assert prefill.deadline_s > 0
                    self.jobs[prefill.request_id] = _Job(prefill, identity.decode())
                case Send(identity, m.Retarget() as retarget):
                    self.retarget(retarget)
                case Send(identity, m.Release(request_id, attempt)):
                    self.release(identity.decode(), request_id, attempt)
                case Deliver():
                    self.deliver(action)
                case Finish(request_id):
                    self.end(request_id, "finished")
                case Fail(request_id):
                    self.end(request_id, "failed")
                case _:
                    pass

    def check_history(self, prefill: m.Prefill) -> None:
        """A later attempt goes on exactly where the client is."""
        request_id = prefill.request_id.partition(".")[0]
        history = list(prefill.token_ids[prefill.num_prompt_tokens :])
        for choice in prefill.choices:
            assert history == self.delivered[request_id, choice.choice_id]

    def retarget(self, message: m.Retarget) -> None:
        job = self.jobs.get(message.request_id)
        if job is None:  # it crossed the worker's own report
            return
        assert job.at_prefill and job.attempt < message.attempt
        job.attempt, job.decoder = message.attempt, message.decode_worker_id
        job.at_decode = job.computed
        if job.computed:
            job.rewind()

    def release(self, worker_id: str, request_id: str, attempt: int) -> None:
        job = self.jobs.get(request_id)
        if job is None or job.attempt > attempt:
            return
        job.at_prefill = job.at_prefill and worker_id != job.prefiller
        job.at_decode = job.at_decode and worker_id != job.decoder
        if not job.at_prefill and not job.at_decode:
            del self.jobs[request_id]

    def deliver(self, action: Deliver) -> None:
        assert action.request_id not in self.ended, "tokens behind the end"
        so_far = self.delivered[action.request_id, action.choice_id]
        for token in action.tokens:
            right = token_at(action.request_id, action.choice_id, len(so_far))
            assert token.token_id == right, "a gap, a repeat, or a change"
            so_far.append(token.token_id)

    def end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended, f"{request_id} ended twice"
        self.ended[request_id] = how

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def requests_known_are_requests_open(self) -> None:
        assert sorted(self.world.state.requests.ids) == sorted(self.open)

    @invariant()
    def nobody_is_overloaded(self) -> None:
        for worker_id, load in self.world.state.requests.legs.loads().items():
            worker = self.world.state.registry.workers[worker_id]
            if load.num_requests > 1 and worker.role == "decode":
                assert load.num_choices <= worker.facts.max_num_seqs
                assert load.num_decode_blocks <= worker.facts.num_blocks
            if load.num_requests > 1 and worker.role == "prefill":
                assert load.num_prompt_blocks <= worker.facts.num_blocks

    @invariant()
    def at_rest_there_is_no_load(self) -> None:
        if not self.open:
            assert self.world.at_rest()

    def teardown(self) -> None:
        """Whatever happened before, everybody has an answer by the deadline."""
        for _ in range(21):
            self.carry_out(self.world.wait(2.0))
        assert not self.open
        assert self.world.at_rest()


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = hypothesis_settings(
    max_examples=70, stateful_step_count=50, deadline=None
)
