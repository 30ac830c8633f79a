"""Calls of workers in several processes, with a two-phase commit.

All workers of a pipeline make the same calls, and count them. The phases of a call are:

    open      before any argument is checked, so that a refusal is a failure of this
              call on all workers, and the next call has the same number on all
    identify  kind, training step, batch: every message carries them, and a worker
              refuses a message of another identity
    work      values are sent as messages
    agree     a two-phase commit: each worker votes when its part is done, the leader
              decides, and sends the values of all votes to all; before the decision no
              worker returns, and none updates its parameters
    end       messages that arrive later for the call are dropped

A worker that fails before its vote notifies all others, which fail as well: without
its vote the leader cannot commit. A worker that has voted may not fail alone; it asks
the leader to abort the call, which the leader refuses after its decision. The leader is
the worker of the first stage: its backward passes end last, so that all other votes
have arrived when its own is made.

A worker that has waited for the timeout asks the others how long they have waited. It
gives up once every worker in the call has been idle for that long.

A worker of the schedule may consist of several processes, whose devices make up one
mesh. They run its actions together, with XLA's collectives among them, in the
schedule's order. A value for another worker is gathered on each of them, and each sends
it to its share of the other worker's processes. A process that did not join a
collective would leave the others in it, so that collectives begin only after all have
agreed to, by a commit at the beginning of the call. A later failure is final: the rest
of a collective that was left half done would receive the values of the next one.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from msgspec.structs import replace

from jdist._errors import value_error
from jdist._scheduling import enter_batch_class
from jdist._tree import PyTree
from jdist.pipeline.run.action_timer import clock_offset
from jdist.pipeline.run.identity import CallArguments, CallIdentity, identity_of
from jdist.pipeline.run.stage_channels import (
    Communicator,
    MessageTag,
    Places,
    StageChannels,
    receive,
)
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.place import (
    DATA_AXIS,
    Place,
    StageMesh,
    devices_of,
    received,
    whole_here,
)
from jdist.rpc import Future, RpcError, RpcTimeout, WorkerInfo, WorkerLost
from jdist.rpc.extension import Agent, incarnation_of

CLOCK = "pipeline.clock"
"""Kind of the request that asks what a worker's clock shows."""

_VALUE, _FAILED, _RESTED = "pipeline.value", "pipeline.failed", "pipeline.rested"
_IDENTITY = "identity"
_CALL, _TAG = "call", "tag"
"""In the metadata of a value: address of the call, and its tag. They are packed as they
are, where the codec would have to encode and decode them."""

_PATIENCE = 1.0
"""Seconds of waiting after which a worker tells all others in which call it is: those
in another one have perhaps sent it nothing that would show it."""

_ANSWER = 10.0
"""Seconds that a worker has, at least, to answer a message, be the timeout shorter: it
answers late while its compiler holds the interpreter's lock."""

_SHORT, _LONG = 2e-5, 2e-3
"""Shortest and longest interval in seconds between polls of an array that several
processes compute."""

_OF_MEMBERS = "VD"
"""Kinds of messages whose sender is a member's number, not a rank of the schedule."""

_SYMPTOM = re.compile("Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|[Cc]onnection")
"""Matches the errors of collectives after the loss of a process."""

_PACKAGE = "jdist.pipeline"
_log = logging.getLogger(_PACKAGE)

_BEGINNING, _END = 0, 1
"""The commits of a call, in order; the first one only where processes compute together.
"""

Address = tuple[str, int]
"""A pipeline, by its workers and its number among theirs; and the number of a call."""


Metadata = dict[str, PyTree]
"""What a message carries besides its value."""


class CallFailure(NamedTuple):
    """Why a call cannot be finished.

    Attributes:
      error: The exception.
      told: Whether another worker has sent it, which sends it to all.
    """

    error: BaseException
    told: bool


@dataclass(slots=True)
class CallRecord:
    """What has arrived for one call of a pipeline.

    Attributes:
      arrived: The values, by their tags.
      identities: The identities of the senders of its messages, by name.
      failure: Why it cannot be finished.
    """

    arrived: dict[MessageTag, Any] = field(default_factory=dict)
    identities: dict[str, list[PyTree]] = field(default_factory=dict)
    failure: CallFailure | None = None


class PipelineMailbox:
    """The messages that have arrived for the pipelines of one worker.

    Args:
      agent: The worker.

    Attributes:
      lock: Guards all other attributes.
      changed: Condition of that lock; notified when a message arrives.
      calls: The record of each call that has not ended here.
      decisions: For the pipelines that this worker leads: the last call and commit that
        succeeded, and the votes of its workers.
      lost: Workers that are gone, and how that was noticed.
      done: The last call of each pipeline that has ended here.
      under_way: The current call of each pipeline, and since when the worker waits in
        it; None while it is at work.
      half_done: The failure among processes that compute together; empty if none.
    """

    def __init__(self, agent: Agent) -> None:
        # Ctrl-C while a condition is entered by `with` may leave it locked, because its
        # `__enter__` is Python code; a lock's is not.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.calls: defaultdict[Address, CallRecord] = defaultdict(CallRecord)
        self.decisions: dict[str, tuple[tuple[int, int], list[PyTree]]] = {}
        self.lost: dict[str, str] = {}
        self.done: dict[str, int] = {}
        self.under_way: dict[str, tuple[int, float | None]] = {}
        self.half_done = ""
        self._pipelines: Counter[str] = Counter()
        self._agent = agent
        # Inline: it does not wait, and every action of a pipeline sends a value.
        agent.register(_VALUE, self._receive, inline=True)
        agent.register(_FAILED, self._fail)
        agent.register(_RESTED, self._rested)
        agent.register(CLOCK, lambda caller, body, meta: time.perf_counter())
        agent.extension_state.on_gone(self._lose)
        self.lost.update(agent.group.lost())

    def new_pipeline(self, names: Sequence[str]) -> str:
        """Makes the name of a pipeline, equal on workers that make them in one order.

        Raises:
          RpcTimeout: Some workers did not come, in an elastic group.
        """
        among = ", ".join(names)
        group = self._agent.group
        if group.elastic:
            # A replacement has counted none of the earlier pipelines. The incarnations
            # in the name start a new count, which is the same on all workers.
            own = incarnation_of(self._agent.info)
            found = group.all_gather(own, names, -1, "Pipeline")
            among = ", ".join(f"{name} ({found[name]})" for name in names)
        with self.lock:
            self._pipelines[among] += 1
            return f"pipeline {self._pipelines[among]} of {among}"

    def _receive(self, caller: WorkerInfo, body: PyTree, meta: Metadata) -> None:
        pipeline, number = meta[_CALL]
        with self.lock:
            if self._note(caller, (pipeline, number), meta):
                arrived = self.calls[pipeline, number].arrived
                arrived[MessageTag(*meta[_TAG])] = body

    def _note(self, caller: WorkerInfo, address: Address, meta: Metadata) -> bool:
        """Records the identity of a message's sender; False if the call has ended."""
        pipeline, number = address
        # A late message of a call that has ended: if kept, it would never be removed.
        if number <= self.done.get(pipeline, -1):
            return False
        # Messages may arrive before this worker has begun the call: its record is made
        # by whichever comes first.
        self.calls[address].identities[caller.name] = meta[_IDENTITY]
        self.changed.notify_all()
        return True

    def _fail(
        self, caller: WorkerInfo, body: PyTree, meta: Metadata
    ) -> list[PyTree] | None:
        """Fails a call that is not decided here; returns the decision if it is."""
        pipeline, number, commit, described = body
        # Outside of the lock: to make an exception may run a user's constructor, and
        # inline handlers take the lock.
        error = self._agent.rebuild(described)
        # Comparison and failure under one lock, as the decision is: either the leader
        # has decided, or it will find the failure.
        with self.lock:
            last, told = self.decisions.get(pipeline, ((-1, _END), []))
            if (number, commit) <= last:
                # The decision of this commit and not a later one, which could not have
                # succeeded without the caller's vote.
                return told
            self.fail((pipeline, number), CallFailure(error, told=True))
            return None

    def fail(self, address: Address, failure: CallFailure) -> None:
        """Records a failure, which every wait in the call raises."""
        with self.lock:
            if address[1] > self.done.get(address[0], -1):
                # The first error is the cause; later ones are consequences of it.
                record = self.calls[address]
                record.failure = record.failure or failure
                self.changed.notify_all()

    def _rested(self, caller: WorkerInfo, body: PyTree, meta: Metadata) -> float | None:
        """The time that this worker has waited in a call; None if it is not in it."""
        pipeline, asked = body
        with self.lock:
            # It has left the call and will do no more for it: its failure is on its
            # way.
            if not self._note(caller, (pipeline, asked), meta):
                return math.inf
        number, since = self.under_way.get(pipeline, (math.inf, None))
        if number > asked:
            return None
        # A worker that is still in an earlier call counts: it will reach the asked one.
        return 0.0 if since is None else time.monotonic() - since

    @contextlib.contextmanager
    def resting(self, address: Address) -> Iterator[None]:
        """Marks this worker as idle in a call, within the block."""
        pipeline, number = address
        self.under_way[pipeline] = number, time.monotonic()
        try:
            yield
        finally:
            self.under_way[pipeline] = number, None

    def loss(self, pipeline: str, name: str) -> str | None:
        """The reason for which a worker of a pipeline was lost; None while it lives."""
        reason = self.lost.get(name)
        group = self._agent.group
        if reason is not None and group.elastic:
            # The loss may be that of an earlier worker of this name, before the
            # pipeline was made: its incarnation is another one.
            present = {(info.name, info.incarnation) for info in group.workers()}
            if any(n == name and f"{n} ({i})" in pipeline for n, i in present):
                return None
        return reason

    def _lose(self, worker: WorkerInfo, reason: str) -> None:
        with self.lock:
            self.lost[worker.name] = reason
            self.changed.notify_all()

    def end(self, address: Address) -> None:
        """Removes the messages of a call; later ones for it are dropped."""
        with self.lock:
            pipeline, number = address
            self.done[pipeline] = number
            self.under_way.pop(pipeline, None)
            for old in [key for key in self.calls if key[0] == pipeline]:
                if old[1] <= number:
                    del self.calls[old]


_lock = threading.Lock()


def mailbox_of(agent: Agent) -> PipelineMailbox:
    """The mailbox of a worker, made at the first request."""
    # One for all pipelines, because rpc has one handler per kind of message.
    state = agent.extension_state
    with _lock:
        if _PACKAGE not in state:
            state[_PACKAGE] = PipelineMailbox(agent)
        found: PipelineMailbox = state[_PACKAGE]
        return found


class Members(NamedTuple):
    """The processes (or threads) of a pipeline, each of which is one of rpc's workers.

    Attributes:
      names: Names of all members.
      ranks: The worker of the schedule to which each member belongs.
      own: Number of this member.
      leader: Number of the member that decides.
    """

    names: Sequence[str]
    ranks: Sequence[int]
    own: int
    leader: int

    @property
    def joint(self) -> bool:
        """Whether a worker of the schedule consists of several members."""
        return len({*self.ranks}) < len(self.ranks)

    def of(self, rank: int) -> list[int]:
        """Numbers of the members of one worker of the schedule."""
        return [number for number, own in enumerate(self.ranks) if own == rank]


@dataclass(eq=False, repr=False)
class WorkerChannels:
    """The channels of one call between rpc's workers; see `StageChannels`.

    Args:
      agent: This worker.
      members: All workers of the pipeline.
      address: The pipeline and the number of the call.
      kind: The public method of the call.
      place: Device or mesh of this worker.
      parts: See `StageChannels`.

    Attributes:
      begun: Whether processes that compute together have agreed to begin.
    """

    agent: Agent
    members: Members
    address: Address
    kind: str
    place: Place
    parts: int
    begun: bool = False

    def __post_init__(self) -> None:
        """Begins to collect what arrives for the call."""
        pipeline, self._number = self.address
        self._names, _, self._own, self._leader = self.members
        self._identity = CallIdentity(self.kind)
        self._meta = {_IDENTITY: self._identity.plain()}
        self._voted = self._over = self._announced = False
        self._timeout = self.agent.default_timeout
        # 0 is no limit.
        self._limit = max(self._timeout, _ANSWER) if self._timeout else 0.0
        self._mailbox = mailbox_of(self.agent)
        self._mailbox.under_way[pipeline] = self._number, None
        with self._mailbox.lock:
            self._record = self._mailbox.calls[self.address]
        devices = devices_of(self.place) or {self.agent.device or jax.devices()[0]}
        self._computes_here = any(one.platform == "cpu" for one in devices)

    @property
    def _name(self) -> str:
        return self._names[self._own]

    @property
    def _operation(self) -> str:
        return f"{self.kind}, call {self._number} of a pipeline"

    def identify(self, given: CallArguments) -> None:
        """See `StageChannels`."""
        self._identity = identity_of(self.kind, given)
        self._meta = {_IDENTITY: self._identity.plain()}
        with self._mailbox.lock:
            self._check()

    # --- values ---

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """See `StageChannels`."""
        mine = self.members.ranks[self._own]
        # Within a worker a message would copy the value for nothing.
        if worker == mine:
            with self._mailbox.lock:
                self._record.arrived[tag] = value
            return
        # A collective, if the value is divided over processes: all of this worker make
        # it, in the order of its actions.
        value = self._whole(value)
        # Each process sends to every n-th one of the other worker, so that each of
        # those gets the value once.
        together = self.members.of(mine)
        share = slice(together.index(self._own), None, len(together))
        for other in self.members.of(worker)[share]:
            self._put(tag, other, value)

    def _put(self, tag: MessageTag, other: int, value: PyTree) -> None:
        """Sends a value to another process."""
        # On a CPU the core that computes is the one that sends: a value sent by another
        # thread would wait for the scheduler, and the other worker for the value. Next
        # to an accelerator a thread of the pool waits for the value and sends it.
        if self._computes_here:
            self._send(tag, other, value)
        else:
            self.agent.pool.run(lambda: self._send(tag, other, value))

    def _send(self, tag: MessageTag, other: int, value: PyTree) -> None:
        agent, to = self.agent, self._names[other]
        meta = {**self._meta, _CALL: self.address, _TAG: tag}
        try:
            if self.members.joint:
                self.computed(value)
            sent = agent.outgoing(to, _VALUE, value, self._limit, meta)
            agent.request(replace(sent, ended=self._ended))
        except BaseException as error:  # noqa: BLE001 - the call's
            self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        """Records an error of a message, if it has one, as the failure of the call."""
        if error is None:
            return
        # Named after the pipeline's call and not after the message of rpc.
        if isinstance(error, WorkerLost):
            error = WorkerLost(error.worker, self._operation, error.reason)
        self._mailbox.fail(self.address, CallFailure(error, told=False))

    def has(self, tag: MessageTag, worker: int) -> bool:
        """See `StageChannels`."""
        return tag in self._record.arrived

    def take(self, tag: MessageTag, worker: int) -> PyTree:
        """See `StageChannels`.

        Raises:
          ValueError: Another worker is in another call.
        """
        with self._mailbox.lock:
            # Tags are equal in all calls: only the identity shows that a value belongs
            # to another batch.
            self._compare()
            value = self._record.arrived.pop(tag)
        return value if tag.kind == "C" else received(value, self.place)

    def _senders(self, tag: MessageTag) -> list[str]:
        """The processes that may send a message of a tag."""
        if tag.kind in _OF_MEMBERS:
            return [self._names[tag.sender]]
        return [self._names[number] for number in self.members.of(tag.sender)]

    def wait(self, waiting: Mapping[MessageTag, object]) -> None:
        """See `StageChannels`.

        Raises:
          WorkerLost: A worker of the pipeline is gone.
          RpcTimeout: All workers that are in the call have waited for the timeout.
          ValueError: Another worker is in another call.
          Exception: An error on another worker, or of a message.
        """
        # The timeout bounds idleness and not work: a worker at work may be compiling,
        # for a time that has no bound.
        began = time.monotonic()
        until = began + (self._timeout or math.inf)
        with self._mailbox.resting(self.address):
            announce = math.inf if self._announced else began + _PATIENCE
            while not self._arrives(waiting, min(until, announce)):
                if time.monotonic() >= until:
                    until = self._prolonged(waiting)
                else:
                    # Two workers in different calls may wait for each other without
                    # having sent a message that would show the mismatch.
                    self._ask_others(_RESTED, self.address)
                self._announced, announce = True, math.inf

    def _prolonged(self, waiting: Mapping[MessageTag, object]) -> float:
        """The next deadline, after the timeout has passed.

        Raises:
          RpcTimeout: No worker that is in the call has been at work since.
        """
        told = self._rests_of_others()
        rested = min((each for each in told.values() if each is not None), default=None)
        if rested is None or rested >= self._timeout:
            # A value may have arrived while the others were asked.
            if not self._arrives(waiting, 0.0):
                raise RpcTimeout(self._late(waiting, told))
            return time.monotonic()
        working = [repr(name) for name, each in told.items() if each == 0.0]
        if working:
            _log.warning(
                "%s It goes on waiting. At work there, and perhaps compiling: %s.",
                self._late(waiting),
                ", ".join(working),
            )
        return time.monotonic() + self._timeout - rested

    def _rests_of_others(self) -> dict[str, float | None]:
        """The time that each other worker has waited in the call, by name.

        None for a worker that is not in the call. Workers that do not answer are left
        out.
        """
        told: dict[str, float | None] = {}
        for name, answer in self._ask_others(_RESTED, self.address).items():
            try:
                told[name] = answer.wait()
            except WorkerLost as lost:  # The group may not have noticed it yet.
                if name in self._needed:
                    self._ended(lost)
            except RpcError:
                continue
        return told

    def _arrives(self, waiting: Mapping[MessageTag, object], until: float) -> bool:
        """Waits for a value until a deadline; whether one of them has arrived."""
        with self._mailbox.lock:
            while not any(self.has(tag, self._own) for tag in waiting):
                self._check()
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._mailbox.changed.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._names)) if rank != self._own]

    @property
    def _needed(self) -> Sequence[str]:
        """Workers whose loss ends the call here."""
        # After its vote this worker needs the leader's decision alone: the leader
        # knows whether it has the vote of a worker that was lost.
        return [self._names[self._leader]] if self._voted else self._names

    def _check(self) -> None:
        """Raises the failure of the call, if there is one."""
        # First the failure that another worker has sent: that the worker is then lost,
        # or in another call, follows from it.
        if self._record.failure is not None:
            raise self._record.failure.error
        self._compare()
        for name in self._needed:
            reason = self._mailbox.loss(self.address[0], name)
            if reason is not None:
                raise WorkerLost(name, self._operation, reason)

    def _compare(self) -> None:
        """Refuses another call of a worker that has sent a message for this one."""
        for name, told in self._record.identities.items():
            if told != self._meta[_IDENTITY]:
                self._identity.check(self._name, CallIdentity(*told), name)

    def _late(
        self,
        waiting: Mapping[MessageTag, object],
        told: Mapping[str, float | None] | None = None,
    ) -> str:
        missing = [
            f"{action} for {_KINDS[tag.kind]} of "
            + " or ".join(map(repr, self._senders(tag)))
            for tag, action in waiting.items()
        ]
        shown = "; ".join(dict.fromkeys(missing))
        absent = [repr(name) for name, rest in (told or {}).items() if rest is None]
        return (
            f"{self._name!r} waited more than {self._timeout} s in "
            f"{self._operation}: {shown}."
            + (f" Not in the call: {', '.join(absent)}." if absent else "")
        )

    # --- processes that compute together ---

    def begin(self) -> None:
        """See `StageChannels`."""
        if self.members.joint:
            try:
                # It compares batches, too: a mismatch must show before the first
                # collective.
                self._commit(_BEGINNING, None)
                self.begun = True
            finally:
                # From here on this worker may fail alone.
                self._voted = self._over = False

    def _whole(self, value: PyTree) -> PyTree:
        """Gathers a value that is divided over several processes, for messages."""
        return jax.tree.map(whole_here, value) if self.members.joint else value

    def computed(self, value: PyTree) -> None:
        """See `StageChannels`."""
        if not self.members.joint:
            jax.block_until_ready(value)
            return
        # Polled, because `block_until_ready` would never return from a collective that
        # another process has left.
        pause = _SHORT
        for leaf in jax.tree.leaves(value):
            is_ready = getattr(leaf, "is_ready", None)  # of arrays
            while is_ready is not None and not is_ready():
                with self._mailbox.lock:
                    self._check()
                    self._mailbox.changed.wait(pause)
                pause = min(2 * pause, _LONG)
        jax.block_until_ready(value)

    def lost_behind(self, error: BaseException) -> BaseException | None:
        """The loss of a process that made a collective fail; None if none was lost."""
        # The error of a collective does not name the process. Heartbeats do, but may
        # notice the loss some seconds later.
        if not (self.begun and _SYMPTOM.search(str(error))):
            return None
        until = time.monotonic() + _ANSWER
        with self._mailbox.lock:
            while (left := until - time.monotonic()) > 0:
                for name in self._names:
                    reason = self._mailbox.loss(self.address[0], name)
                    if reason is not None:
                        return WorkerLost(name, self._operation, reason)
                self._mailbox.changed.wait(left)
        return None

    # --- the end ---

    def agree(self, value: PyTree, computed: PyTree = None) -> list[PyTree]:
        """See `StageChannels`."""
        value = self._whole(value)
        # Before the vote: dispatched work may still fail, and after its vote a worker
        # may not.
        self.computed(computed)
        told = self._commit(_END, value)
        self._over = True
        return told

    def _commit(self, commit: int, value: PyTree) -> list[PyTree]:
        """Goes on with all workers, or raises on all; the values of all."""
        leads = self._own == self._leader
        return self._lead(commit, value) if leads else self._vote(commit, value)

    def _lead(self, commit: int, value: PyTree) -> list[PyTree]:
        """Collects the votes, decides, and sends the decision to all."""
        votes = {self._own: value}
        while len(votes) < len(self._names):
            left = [rank for rank in self._others() if rank not in votes]
            missing = [_tag("V", commit, rank) for rank in left]
            there = [tag for tag in missing if self.has(tag, self._own)]
            for tag in there:
                votes[tag.sender] = self.take(tag, self._own)
            if not there:
                self.wait(dict.fromkeys(missing, _MOMENTS[commit]))
        told = [votes[rank] for rank in sorted(votes)]
        with self._mailbox.lock:
            self._check()
            # Under one lock with the check: a request to give up finds a decision, or
            # prevents it.
            self._mailbox.decisions[self.address[0]] = (self._number, commit), told
            self._over = True
        for rank in self._others():
            self._put(_tag("D", commit, self._own), rank, told)
        return told

    def _vote(self, commit: int, value: PyTree) -> list[PyTree]:
        """Sends this worker's vote to the leader; returns the decision."""
        decision = _tag("D", commit, self._leader)
        # Set before the vote is sent: an interrupt in `_put` may come after that.
        self._voted = True
        try:
            self._put(_tag("V", commit, self._own), self._leader, value)
            told = receive(self, decision, self._own, _MOMENTS[commit])
        except BaseException as error:
            told = self._give_up(commit, error)
            # With a late decision the call succeeds in spite of a timeout; an interrupt
            # is raised in any case.
            if told is None or not isinstance(error, RpcTimeout):
                raise
        return list(told)

    def _give_up(self, commit: int, error: BaseException) -> list[PyTree] | None:
        """Asks the leader to abort the call; returns the decision if it was made."""
        # A failure that was sent to all is known to the leader.
        failure = self._record.failure
        if failure is not None and failure.told:
            return None
        body = (*self.address, commit, self.agent.describe(error))
        # If the leader cannot be reached, the call may have succeeded: no failure is
        # sent to the others then.
        self._over = True
        try:
            told = self.agent.call(self._names[self._leader], _FAILED, body)
        except RpcError as unreachable:
            error.add_note(
                f"Whether others finished the call is unknown: {unreachable}"
            )
            return None
        if told is None:
            self._over = False
        else:
            error.add_note("The other workers have finished the call.")
        return told

    def end(self, error: BaseException | None) -> None:
        """See `StageChannels`."""
        failure = self._record.failure
        # A failure that came from another worker was sent to all by that worker.
        known = failure is not None and failure.told and failure.error is error
        if error is not None and not known and not self._over:
            body = (*self.address, _END, self.agent.describe(error))
            self._ask_others(_FAILED, body)
        self._mailbox.end(self.address)

    def _ask_others(self, kind: str, body: PyTree) -> dict[str, Future[Any]]:
        """Sends a request to the other live workers; their futures by name."""
        # Callers need not wait for the answers: a worker that is not reached notices
        # by its own timeout.
        names = [self._names[rank] for rank in self._others()]
        return {
            name: self.agent.call_async(name, kind, body, self._limit, self._meta)
            for name in names
            if self._mailbox.loss(self.address[0], name) is None
            and not self.agent.closed
        }


class WorkerCommunicator(Communicator):
    """The communicator of rpc's workers, one per process or thread.

    Args:
      agent: This worker.
      places: Devices of the workers; those of other processes may be None.
      members: The workers of rpc.
      about: Further text that must be the same on all workers.
      data_axis: See `Workers`.
    """

    sees_all = False

    def __init__(
        self,
        agent: Agent,
        places: Places,
        members: Members,
        about: str,
        data_axis: str | None,
    ) -> None:
        # Threads that receive large messages must not interrupt those that compute.
        enter_batch_class()
        super().__init__(places)
        self._agent = agent
        self._members = members
        self._about = about
        self._pipeline = mailbox_of(agent).new_pipeline(members.names)
        self._calls = itertools.count()
        self._data_axis = data_axis
        self._parts: int | None = None  # Known once all workers have met.

    @contextlib.contextmanager
    def opened(self, kind: str) -> Iterator[StageChannels]:
        """See `Communicator`."""
        # At the first call and not in the constructor, so that making a pipeline does
        # not block.
        if self._parts is None:
            self._parts = self._meet()
        address = self._pipeline, next(self._calls)
        place = self.places.devices[self.places.own[0]]
        channels = WorkerChannels(
            self._agent, self._members, address, kind, place, self._parts
        )
        mailbox = mailbox_of(self._agent)
        with self.ending(channels):
            # Collectives are matched by their order: the rest of a half done one in
            # another process would receive values of this call.
            if self._members.joint and mailbox.half_done:
                rule = "must not be called again after a call that failed under way"
                remedy = "Start the run again from its last checkpoint."
                got = f"a collective half done: {mailbox.half_done}"
                raise value_error("Pipeline(places)", rule, got, remedy)
            try:
                yield channels
            except BaseException as error:
                lost = channels.lost_behind(error)
                if channels.begun:
                    mailbox.half_done = str(lost or error) or type(error).__name__
                if lost is not None:
                    raise lost from error
                raise

    def clock_offset(self) -> float:
        """See `Communicator`."""
        first = self._members.names[0]
        if first == self._agent.info.name:
            return 0.0
        ask = functools.partial(self._agent.call, first, CLOCK, None)
        return clock_offset(ask, time.perf_counter)

    def _meet(self) -> int:
        """Waits for all workers and compares their pipelines.

        Returns:
          The smallest number of rows that the meshes of all workers can split.
        """
        schedule = self.places.schedule
        mine = f"{schedule!r} as {self._pipeline}, {self._about}"
        # A digest, because a schedule may have millions of actions.
        digest = hashlib.sha256(repr(_plain(schedule)).encode()).hexdigest()[:8]
        place = self.places.devices[self.places.own[0]]
        axes = dict(place.mesh.shape) if isinstance(place, StageMesh) else None
        told = self._agent.group.all_gather(
            [f"{mine}, actions {digest}", axes], self._members.names, -1, "Pipeline"
        )
        if len({text for text, _ in told.values()}) > 1:
            rule = "must be the same on all workers, made in the same order"
            shown = "; ".join(
                f"{name}: {told[name][0]}" for name in self._members.names
            )
            raise value_error("Pipeline(schedule)", rule, shown)
        name = DATA_AXIS if self._data_axis is None else self._data_axis
        # All workers cut micro-batches alike, so the sizes of all data axes count.
        meshes = [axes for _, axes in told.values() if axes is not None]
        if self._data_axis is not None and not any(name in axes for axes in meshes):
            rule = "must be an axis of one of the workers' meshes"
            got = f"{name!r}, where the axes are {sorted({*itertools.chain(*meshes)})}"
            raise value_error("Workers(data_axis=...)", rule, got)
        return math.lcm(*(axes.get(name, 1) for axes in meshes))


def _plain(schedule: Schedule) -> list[PyTree]:
    columns = schedule.columns
    arrays = columns.first, columns.kind, columns.stage, columns.micro_batch
    return [schedule.placement, *(array.tolist() for array in arrays)]


def _tag(kind: str, commit: int, sender: int) -> MessageTag:
    return MessageTag(kind, commit, "", -1, sender)


_MOMENTS = "the beginning of the call", "the end of the call"
"""What is waited for in each commit."""

_KINDS = {"F": "an output", "B": "a cotangent", "G": "the gradient"}
_KINDS |= {
    "f": "the shapes of an output",
    "b": "the shapes of a cotangent",
    "T": "a tied gradient",
    "C": "a stage to be saved",
    "V": "the vote",
    "D": "the decision",
}
