"""A workers of workers that only have the reference protocol: no threads, no sockets.

Whatever is under way lies in a bag, and the test says what happens to it next. The
workers knows which values must live, and checks it after every step.
"""

from typing import Any, NamedTuple

from jdist.rpc.base.ids import IdCounter
from jdist.rpc.rref.messages import (
    Abort,
    Accept,
    CreationName,
    Delete,
    Fork,
    Ref,
    Take,
)
from jdist.rpc.rref.protocol import Never, Protocol, Send, Settled, UserFork


class Message(NamedTuple):
    """A message of the protocol: it arrives once, at any time."""

    sender: int
    to: int
    content: Any


class Answer(NamedTuple):
    """The owner's answer to a Fork or Abort."""

    sender: int
    to: int
    fork: Any
    counted: bool


class Call(NamedTuple):
    """A user's call or answer that brings a reference; it may get lost."""

    sender: int
    to: int
    ref: Ref


class Creation(NamedTuple):
    """A request to create a value; it may get lost."""

    sender: int
    to: int
    user_fork: UserFork
    low_water_mark: int


class Created(NamedTuple):
    """The answer to it."""

    sender: int
    to: int
    user_fork: UserFork


class OwnerValue:
    """A value, by its name."""

    def __init__(self):
        self.freed = 0
        self.never = None


class Handle(NamedTuple):
    """What a program holds: a fork of its worker, or a value of its worker's own."""

    worker: int
    rref: Any
    user_fork: UserFork | None
    owner_value: OwnerValue | None


class SimulatedWorkers:
    """Workers 0 to `size` - 1 and what is under way between them."""

    def __init__(self, size):
        self.workers = [Protocol(me, IdCounter(me), OwnerValue) for me in range(size)]
        self.bag = []
        self.handles = []
        self.owner_values = {}
        self.alive = set(range(size))
        self.lost = set()
        self.told = set()
        self.settled = []

    # --- what programs do ---

    def make(self, worker):
        owner_value, rref = OwnerValue(), self.workers[worker].name()
        self.owner_values[rref] = owner_value
        self.handles.append(Handle(worker, rref, None, owner_value))

    def remote(self, worker, owner):
        user_fork, low_water_mark = self.workers[worker].create(owner, [])
        self.handles.append(Handle(worker, user_fork.rref, user_fork, None))
        self.bag.append(Creation(worker, owner, user_fork, low_water_mark))

    def share(self, handle, to):
        protocol = self.workers[handle.worker]
        if handle.user_fork is None:
            ref = protocol.give_owned(handle.rref, handle.owner_value, to)
        elif handle.user_fork.failed is None:
            ref = protocol.give(handle.user_fork, to)
        else:
            return
        self.bag.append(Call(handle.worker, to, ref))

    def drop(self, handle):
        self.handles.remove(handle)
        if handle.user_fork is not None:
            self._do(handle.worker, self.workers[handle.worker].drop(handle.user_fork))

    # --- what happens to what is under way ---

    def deliver(self, item):
        if item.to not in self.alive and isinstance(item, Call | Creation):
            self.fail(item, arrives_late=False)
            return
        self.bag.remove(item)
        if item.to not in self.alive:
            return
        getattr(self, f"_{type(item).__name__.lower()}")(item)

    def _message(self, item):
        protocol, content = self.workers[item.to], item.content
        if isinstance(content, Fork):
            counted = protocol.on_fork(item.sender, content)
            self.bag.append(Answer(item.to, item.sender, content.fork, counted))
        elif isinstance(content, Abort):
            self._do(item.to, protocol.on_abort(item.sender, content))
            self.bag.append(Answer(item.to, item.sender, content.fork, True))
        else:
            react = {
                Accept: protocol.on_accept,
                Delete: protocol.on_delete,
                Take: protocol.on_take,
            }
            self._do(item.to, react[type(content)](item.sender, content))

    def _answer(self, item):
        protocol = self.workers[item.to]
        if item.counted:
            self._do(item.to, protocol.answered(item.fork))
        else:
            assert self.lost, "a fork was refused although no worker was lost"
            self._do(item.to, protocol.answered(item.fork, "freed"))

    def _call(self, item):
        taken, effects = self.workers[item.to].take(item.sender, item.ref)
        self._do(item.to, effects)
        if taken is None:
            return
        if isinstance(taken, UserFork):
            self.handles.append(Handle(item.to, item.ref.rref, taken, None))
        else:
            self.handles.append(Handle(item.to, item.ref.rref, None, taken.owner_value))
            self._names(item.ref.rref, taken.owner_value)

    def _creation(self, item):
        user_fork = item.user_fork
        protocol = self.workers[item.to]
        name = CreationName(user_fork.rref, user_fork.fork, item.low_water_mark)
        entry = protocol.on_create(item.sender, name)
        if entry is not None:
            self._names(user_fork.rref, entry.owner_value)
            self.bag.append(Created(item.to, item.sender, user_fork))

    def _created(self, item):
        self._do(item.to, self.workers[item.to].answered(item.user_fork.fork))

    def fail(self, item, arrives_late):
        """The call gets no answer; what it brought may arrive all the same."""
        if not arrives_late:
            self.bag.remove(item)
        if item.sender not in self.alive:
            return
        protocol = self.workers[item.sender]
        if isinstance(item, Call):
            effects = protocol.undelivered(item.ref.fork, item.to)
        else:
            effects = protocol.not_created(item.user_fork, "timed out")
        self._do(item.sender, effects)

    def lose(self, worker):
        """It dies; the others are told one by one."""
        self.alive.discard(worker)
        self.lost.add(worker)
        self.bag = [item for item in self.bag if item.sender != worker]
        self.handles = [h for h in self.handles if h.worker != worker]

    def tell(self, worker, lost):
        if (worker, lost) not in self.told and worker in self.alive:
            self.told.add((worker, lost))
            self._do(worker, self.workers[worker].gone(lost, f"{lost} died"))

    # --- what must hold ---

    def check(self):
        """No value that somebody can still get at has been freed."""
        for handle in self.handles:
            self._must_live(handle.rref, handle.user_fork)
        if not self.lost:
            for item in self.bag:
                if isinstance(item, Call) and self._has_yet_to_arrive(item):
                    self._must_live(item.ref.rref, None)

    def finish(self):
        """Everything is dropped and delivered: then nothing may be left anywhere."""
        for lost in self.lost:
            for worker in list(self.alive):
                self.tell(worker, lost)
        while self.bag or self.handles:
            for handle in list(self.handles):
                self.drop(handle)
            for item in list(self.bag):
                self.deliver(item)
        for me in self.alive:
            protocol = self.workers[me]
            assert (len(protocol.owned), len(protocol.user_forks)) == (0, 0)
            assert protocol.forks_in_transit == 0
        for rref, owner_value in self.owner_values.items():
            assert owner_value.freed <= 1, rref
        for user_fork in self.settled:
            assert self.settled.count(user_fork) == 1

    def _has_yet_to_arrive(self, call):
        given = self.workers[call.sender].in_transit(call.ref.fork, call.to)
        return given is not None and not self._was_redelivered(call)

    def _was_redelivered(self, call):
        window = self.workers[call.to]._taken[call.sender]
        return window.seen(call.ref.fork.local_id)

    def _must_live(self, rref, user_fork):
        owner_value = self.owner_values.get(rref)
        if owner_value is None or (
            user_fork is not None and user_fork.failed is not None
        ):
            return
        if self.lost and user_fork is not None and not user_fork.counted:
            return
        assert not owner_value.freed, f"{rref} was freed while it was held"

    def _names(self, rref, owner_value):
        assert self.owner_values.setdefault(rref, owner_value) is owner_value, (
            "one reference, two values"
        )

    def _do(self, worker, effects):
        for effect in effects:
            if isinstance(effect, Send):
                if effect.to in self.alive:
                    self.bag.append(Message(worker, effect.to, effect.message))
            elif isinstance(effect, Settled):
                assert not effect.user_fork.pending
                self.settled.append(effect.user_fork)
            elif isinstance(effect, Never):
                assert effect.owner_value.never is None
                effect.owner_value.never = effect.reason
            elif all(
                handle.owner_value is not effect.owner_value for handle in self.handles
            ):
                effect.owner_value.freed += 1
        self.check()
