"""The messages of an elastic run between the workers of an rpc group.

A replica sends rank 0 its report and sums. The answer, when the leader has one, is a
directive, totals, and a newcomer's state; or None before rank 0 has begun the run.

The leader's state machine runs in the process of rank 0, whose worker is a replica too.
A replica's number is the incarnation of its worker, which is never reused.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import msgspec

from jdist._errors import value_error
from jdist._scheduling import enter_batch_class
from jdist._tree import first_difference
from jdist.data_parallel.elasticity.follower import Follower
from jdist.data_parallel.elasticity.leader import (
    Abandon,
    Commit,
    Directive,
    Effect,
    Leader,
    Order,
    Part,
    ReplicaReport,
    RunTerms,
)
from jdist.data_parallel.elasticity.replica_work import ReplicaWork, Snapshot
from jdist.data_parallel.step.train_state import TrainState
from jdist.reduction import Partial
from jdist.rpc import Future, ProtocolError, RpcError, WorkerInfo
from jdist.rpc.extension import (
    NEEDS,
    Agent,
    current_agent,
    extend,
    incarnation_of,
    unpacked,
)

_REPORT = "elastic.report"
_PACKAGE = "jdist.data_parallel.elasticity"
_META = {NEEDS: f"{_PACKAGE}.replica_group:install"}

# Seconds after which a replica asks again whether rank 0 has begun.
_PAUSE = 0.05

State = tuple[int | None, list[jax.Array]]
"""The number of steps of a state, and its leaves."""

Answer = tuple[tuple[Any, ...], dict[int, list[jax.Array]], State | None]
"""A directive's fields; the leaves of the totals that it applies, by step; and the
state that it has to take."""


class Message(NamedTuple):
    """A message from a replica to rank 0."""

    run: str
    """The run's name."""

    terms: dict[str, str]
    """Settings of the run, by name, on which all replicas have to agree."""

    report: ReplicaReport | None
    """None if the replica leaves."""

    sums: list[list[jax.Array]]
    """The leaves of each part's sum."""


# As in `jdist.autograd.engine.messages`: read in the one thread of an import.
for _kind in (Message, Directive):
    msgspec.msgpack.Decoder(_kind)


class LeaderService:
    """Connects the messages of one run to the state machine of its leader.

    Args:
      agent: The worker of rank 0.
      terms: Parameters of the run.
      agreed: Settings on which all replicas must agree.
      work: Computes totals.
      follower: The replica of rank 0, whose state newcomers are sent.
      departed: The replicas whose workers have left the group, noted before `gone`.
    """

    def __init__(
        self,
        agent: Agent,
        terms: RunTerms,
        agreed: dict[str, str],
        work: ReplicaWork,
        follower: Follower,
        departed: Set[int],
    ) -> None:
        self._timer, self._pool = agent.timer, agent.pool
        self._own = incarnation_of(agent.info)
        self._leader = Leader(terms, self._own)
        self._terms = terms
        self._agreed = agreed
        self._work = work
        self._follower, self._departed = follower, departed
        self._structure = work.sum_structure
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        # Of reports that the leader has not answered yet.
        self._answers: dict[int, Future[Answer]] = {}
        # By step and part, since the last commit.
        self._sums: dict[tuple[int | None, Part], Partial] = {}
        self._totals: dict[int, list[jax.Array]] = {}
        self._failed: str | None = None
        # Weakly: an announced moment is not taken back, and would keep the state and
        # the sums of a finished run until the deadline of its last step.
        tick = weakref.WeakMethod(self._tick)

        def due(now: float) -> None:
            if (own := tick()) is not None:
                # In a thread of the pool: a tick waits for the lock, the timer must
                # not.
                agent.pool.run(own)

        self._alarm = agent.timer.alarm(due)

    def report(self, replica: int, message: Message) -> Future[Answer]:
        """Handles a report; the answer comes when the leader has a directive.

        Raises:
          ValueError: The replica has other settings than rank 0.
        """
        if difference := first_difference(self._agreed, message.terms):
            name, here, there = difference
            rule = f"must have the same {name} on all workers, {here} as on rank 0"
            raise value_error("Elastic.run(...)", rule, there)
        report, answer = message.report, Future[Answer]()
        assert report is not None

        def reported(now: float) -> list[Effect]:
            # If it has departed since, this would give it its seat back.
            if replica in self._departed:
                return []
            self._answers[replica] = answer
            for part, leaves in zip(report.parts, message.sums, strict=True):
                # Two replicas may have computed it: the first result was counted.
                total = self._structure.unflatten(leaves)
                self._sums.setdefault((report.step, part), total)
            return self._leader.report(replica, report, now)

        self._react(reported)
        return answer

    def gone(self, replica: int) -> None:
        """Handles the loss or departure of a replica."""

        def left(now: float) -> list[Effect]:
            self._answers.pop(replica, None)
            return self._leader.gone(replica, now)

        self._react(left)

    def fail(self, reason: str) -> None:
        """Ends the run with an error on all replicas."""
        with self._lock:
            self._failed = reason
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(RpcError(reason))

    def wait(self) -> None:
        """Waits until all replicas have received the directive that ends the run."""
        # Not without limit: a replica slower than the deadline gets an error instead.
        with self._ended:
            self._ended.wait_for(lambda: self._leader.is_over, self._terms.timeout)

    def _tick(self) -> None:
        self._react(self._leader.tick)

    def _react(self, event: Callable[[float], list[Effect]]) -> None:
        """Passes an event to the leader, and carries out its effects."""
        orders: list[tuple[Future[Answer], Answer]] = []
        failed = None
        with self._lock:
            try:
                effects = event(time.monotonic())
                if self._failed is not None:
                    raise RpcError(self._failed)
                orders = self._handle(effects)
            except RpcError as error:
                failed = str(error)
            except Exception as error:  # noqa: BLE001 - all replicas have to know
                failed = f"Rank 0 could not add up a step's gradient: {error!r}"
        # In another thread: before a report's answer is returned it would be sent after
        # those of the other replicas.
        if orders:
            self._pool.run(partial(self._send, orders))
        if failed is not None:
            self.fail(failed)

    def _send(self, orders: list[tuple[Future[Answer], Answer]]) -> None:
        """Completes answers, which sends them; outside the lock, because it may block.

        Args:
          orders: The answers; that of rank 0's own replica is the last.
        """
        pool = self._pool
        # A state takes longer than all else, and no step waits for its replica.
        for answer, value in orders:
            if value[2] is not None:
                pool.run(partial(answer.set_result, value))
        left = deque(each for each in orders if each[1][2] is None)

        def rest() -> Iterator[tuple[Future[Answer], Answer]]:
            with contextlib.suppress(IndexError):  # the last one is taken
                while True:
                    yield left.popleft()

        def hand_over() -> None:
            for answer, value in rest():
                pool.run(partial(answer.set_result, value))

        if len(left) > 1:
            # A peer that has stopped reading must not hold up the others for long.
            self._timer.later(self._terms.timeout / 4, hand_over)
        for answer, value in rest():
            answer.set_result(value)

    def _too_few(self, ready: int) -> str:
        terms = self._terms
        return (
            f"No step could begin for {terms.join_timeout:g} s: {ready} of the "
            "replicas were ready, and `Elastic.run(min_replicas=...)` is "
            f"{terms.min_replicas}. Start more workers, or give a longer "
            "`Elastic.run(join_timeout=...)`."
        )

    def _handle(self, effects: Sequence[Effect]) -> list[tuple[Future[Answer], Answer]]:
        orders: dict[int, Answer] = {}
        for effect in effects:
            match effect:
                case Commit(step, parts, oldest):
                    sums = {part: self._sums[step, part] for part in parts}
                    self._totals[step] = jax.tree.leaves(self._work.total(sums))
                    self._sums.clear()
                    for old in [each for each in self._totals if each < oldest]:
                        del self._totals[old]
                case Order(replica, directive):
                    totals = {step: self._totals[step] for step in directive.apply}
                    state = self._state() if directive.fetch else None
                    orders[replica] = tuple(directive), totals, state
                case Abandon(ready):
                    raise RpcError(self._too_few(ready))
        self._alarm.set(self._leader.next_deadline())
        if self._leader.is_over:
            self._ended.notify_all()
        # A replica that was lost meanwhile has no pending answer.
        known = [each for each in self._answers if each in orders]
        # Rank 0's own last: where its computation shares a core with the thread that
        # sends, the others would get theirs only once its share is computed.
        known.sort(key=lambda each: each == self._own)
        return [(self._answers.pop(each), orders[each]) for each in known]

    def _state(self) -> State:
        held, state = self._follower.snapshot
        return held, jax.tree.leaves(state)


def _unpacked(body: Any) -> Message:
    """Checks the types of a message, and unpacks it."""
    rule = "A report of an elastic run has a name, terms, numbers and sums"
    message: Message = unpacked(body, Message, rule)
    parts = () if message.report is None else message.report.parts
    if len(parts) != len(message.sums):
        raise ProtocolError(f"{rule}, as many of these as parts.")
    return message


class ElasticRuns:
    """The elastic runs of one worker: those that it leads or takes part in."""

    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()
        self._leaders: dict[str, LeaderService | None] = {}  # None once it is over.
        self._names: set[str] = set()  # Of those that it takes part in.
        self.departed: set[int] = set()
        agent.register(_REPORT, self._on_report)
        agent.extension_state.on_gone(self._on_gone)

    @contextlib.contextmanager
    def taking_part(self, name: str, leader: LeaderService | None) -> Iterator[None]:
        """Leads the run, or only holds its name, while the block runs.

        Args:
          name: Name of the run.
          leader: None on workers other than rank 0's.

        Raises:
          ValueError: The worker is in a run of that name, or has led one.
        """
        argument = "Elastic.run(name=...)"
        with self._lock:
            if name in self._names:
                rule = "must not be that of a run that this worker is in"
                raise value_error(argument, rule, name)
            if leader is not None:
                if name in self._leaders:
                    rule = "must be new in the group: the run of that name has begun"
                    raise value_error(argument, rule, name)
                self._leaders[name] = leader
            self._names.add(name)
        ending = "it is over"
        try:
            yield
        except BaseException as error:
            ending = f"rank 0 has left it: {error!r}"
            raise
        finally:
            self._names.remove(name)
            if leader is not None:
                # None stays under the name, so that late reports learn that the run is
                # over.
                self._leaders[name] = None
                leader.fail(f"The elastic run {name!r} has ended: {ending}.")

    def _on_report(
        self, caller: WorkerInfo, body: Any, meta: Mapping[str, Any]
    ) -> Future[Answer] | None:
        message, replica = _unpacked(body), incarnation_of(caller)
        run = message.run
        with self._lock:
            if run not in self._leaders:
                return None
            leader = self._leaders[run]
        if leader is None:
            raise RpcError(
                f"The elastic run {run!r} is over on rank 0; its last checkpoint, "
                "if it writes any, has the state."
            )
        if message.report is None:
            leader.gone(replica)
            return None
        answer = leader.report(replica, message)
        if replica in self.departed:
            raise RpcError(f"{caller.name!r} was given up by the group.")
        return answer

    def _on_gone(self, worker: WorkerInfo, reason: str) -> None:
        replica = incarnation_of(worker)
        with self._lock:
            self.departed.add(replica)
            leaders = [each for each in self._leaders.values() if each is not None]
        for leader in leaders:
            leader.gone(replica)


def install(agent: Agent) -> None:
    """Installs the handlers of elastic runs in a worker."""
    agent.extension_state[_PACKAGE] = ElasticRuns(agent)


extend(_PACKAGE, install)


def follow_leader(
    name: str,
    terms: RunTerms,
    agreed: dict[str, str],
    make_work: Callable[[jax.Device | None], ReplicaWork],
    save_every: int | None,
) -> tuple[TrainState, dict[int, jax.Array]]:
    """Takes part in a run as the current worker, until it is over.

    Args:
      name: Name of the run.
      terms: Parameters of the run.
      agreed: Settings on which all replicas must agree.
      make_work: Creates the computation of this replica on its device.
      save_every: Steps between checkpoints; None for none.

    Returns:
      The state after the last step, and the losses of the steps applied here.
    """
    agent = current_agent()
    enter_batch_class()  # Messages arrive while it computes.
    runs: ElasticRuns = agent.extension_state[_PACKAGE]
    work = make_work(agent.device)
    is_leader = agent.info.id == 0
    follower = Follower(work, terms.steps, save_every if is_leader else None)
    leader = None
    if is_leader:
        leader = LeaderService(agent, terms, agreed, work, follower, runs.departed)
    with contextlib.closing(work), runs.taking_part(name, leader):
        if is_leader:
            follower.snapshot = work.restore()
        _follow(agent, name, terms, agreed, follower, work)
        if leader is not None:
            leader.wait()
    state = follower.snapshot.state
    assert state is not None
    return state, work.losses


def _follow(
    agent: Agent,
    name: str,
    terms: RunTerms,
    agreed: dict[str, str],
    follower: Follower,
    work: ReplicaWork,
) -> None:
    """Reports and carries out directives, until the run is over."""
    structure, whole = work.sum_structure, jax.tree.structure(work.first)
    report = ReplicaReport(follower.snapshot.held, None, ())
    sums = list[list[jax.Array]]()
    begin_by, pause = time.monotonic() + terms.join_timeout, threading.Event()
    while not follower.over:
        message = (name, agreed, tuple(report), sums)
        try:
            # Without a timeout: the leader may be waiting for more replicas.
            pending = agent.call_async(0, _REPORT, message, 0, _META)
            answer = pending.wait(0)
        except RpcError:
            # If rank 0 is lost, its heir saves the last state for the next start.
            held, state = follower.snapshot
            if follower.heir and work.folder is not None and state is not None:
                assert held is not None
                work.write(held, state)
            raise
        if answer is None:
            if time.monotonic() >= begin_by:
                raise RpcError(
                    f"Rank 0 has not begun the elastic run {name!r} for "
                    f"{terms.join_timeout:g} s. Call `run` there as well, or give a "
                    "longer `Elastic.run(join_timeout=...)`."
                )
            pause.wait(_PAUSE)
            continue
        row, totals, sent = answer
        given = {step: structure.unflatten(leaves) for step, leaves in totals.items()}
        directive = unpacked(row, Directive, "Rank 0 answers by a directive")
        try:
            fetched = None
            if sent is not None:
                held, leaves = sent
                fetched = Snapshot(held, jax.tree.unflatten(whole, leaves))
            report, found = follower.follow(directive, given, fetched)
        except BaseException:
            if not agent.info.id:
                raise  # The run ends with rank 0: its shares go to no other replica.
            leaving: Any = (name, agreed, None, [])
            with contextlib.suppress(RpcError):
                agent.call(0, _REPORT, leaving, meta=_META)
            raise
        sums = [jax.tree.leaves(total) for total in found]
