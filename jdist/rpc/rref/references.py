"""The references of one worker at work: the protocol, its messages and its waits."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError, RpcError, WorkerLost
from jdist.rpc.base.future import Future
from jdist.rpc.base.ids import GloballyUniqueId, IdCounter
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.codec.message_context import Parcel
from jdist.rpc.rref.cell import Cell, fail, new_cell
from jdist.rpc.rref.held import Held
from jdist.rpc.rref.keeper import Keeper
from jdist.rpc.rref.messages import Abort, Accept, Delete, Fork, Message, Ref, Take
from jdist.rpc.rref.owned import Entry
from jdist.rpc.rref.post import Post
from jdist.rpc.rref.protocol import Created, Effects, Freed, Never, Protocol, Settled
from jdist.rpc.rref.wire import refs_in

if TYPE_CHECKING:
    from jdist.rpc.base.deadline import Deadline
    from jdist.rpc.calls.agent import Agent
    from jdist.rpc.calls.execution import Execution
    from jdist.rpc.rref.reference import RRef

Backward = Callable[["RRef[Any]", int, bool], None]


class References:
    """What one worker owns, holds, gives and takes.

    Args:
      agent: The worker.
      make: Makes an RRef: `RRef._make`.

    Attributes:
      agent: The worker.
      handle: Makes an RRef with these references.
      backward: What `RRef.backward` runs; autograd sets it.
      released: Whether every reference was given up, because the worker shuts down.
    """

    def __init__(self, agent: "Agent", make: "Callable[..., RRef[Any]]") -> None:
        self.agent = agent
        self.handle = functools.partial(make, self)
        self.backward: Backward | None = None
        self.released = False
        self.begin(agent.info.id)
        # Taken as it is, not by its condition: see `turn`.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waits: dict[GloballyUniqueId, Future[None]] = {}
        self._answers: dict[GloballyUniqueId, Execution] = {}
        self._leaks: list[str] = []
        self._keeper = Keeper(f"{agent.info.name} references", self._drop)
        self.post = Post(agent, self._keeper, self._receive, self._answered)

    def begin(self, number: int) -> None:
        """This worker belongs to a group, and has this number there."""
        self._protocol = Protocol(number, IdCounter(number), new_cell)

    # --- values of this worker ---

    def name(self) -> GloballyUniqueId:
        """The id for a value of this worker's own."""
        with self._lock:
            return self._protocol.name()

    def find(self, rref: GloballyUniqueId) -> Cell:
        """Where the value of this id is or will be.

        Raises:
          RpcError: It was freed.
        """
        with self._lock:
            entry = self._protocol.owned.find(rref)
        if entry is None:
            raise RpcError(_freed(rref))
        return entry.cell

    def create_here(self, rref: GloballyUniqueId, cell: Cell) -> None:
        """A request to itself will fill the cell: it counts as a holder till then."""
        with self._lock:
            entry = self._protocol.owned.share(rref, cell)
            entry.holders[rref] = self._protocol.me

    def created_here(self, rref: GloballyUniqueId) -> None:
        """The request to itself is over."""
        self._do(lambda p: p.on_delete(p.me, Delete(rref, rref)))

    def on_create(
        self,
        creator: WorkerInfo,
        rref: GloballyUniqueId,
        fork: GloballyUniqueId,
        floor: int,
    ) -> Cell:
        """A request to create a value arrived: where to put it.

        Raises:
          RpcError: The request was given up by the creator, which is known already.
        """
        with self._lock:
            entry = self._protocol.on_create(incarnation_of(creator), rref, fork, floor)
        if entry is None:
            raise RpcError("RRef creation was given up before the request arrived.")
        return entry.cell

    # --- values of others ---

    def create(self, owner: int) -> Created:
        """Another worker will be asked to create a value."""
        self._keeper.start()
        with self._lock:
            return self._protocol.create(owner)

    def created(self, held: Held) -> None:
        """It has."""
        self._do(lambda protocol: protocol.created(held))

    def not_created(self, held: Held, reason: str) -> None:
        """The request failed."""
        self._do(lambda protocol: protocol.not_created(held, reason))

    def not_asked(self, held: Held) -> None:
        """The request was not even sent."""
        with self._lock:
            self._protocol.not_asked(held)

    @property
    def drop(self) -> Callable[[Any], None]:
        """What a finalizer calls with the fork that nobody uses any more."""
        return self._keeper.drop

    # --- giving and taking ---

    def give(self, held: Held, parcel: Parcel) -> Ref:
        """Puts a reference of another worker's value into a message."""
        with self._lock:
            return self._put(
                self._protocol.give(held, incarnation_of(parcel.worker)), parcel
            )

    def give_owned(self, rref: GloballyUniqueId, cell: Cell, parcel: Parcel) -> Ref:
        """Puts a reference of this worker's value into a message."""
        to = incarnation_of(parcel.worker)
        with self._lock:
            return self._put(self._protocol.give_owned(rref, cell, to), parcel)

    def take(self, ref: Ref, parcel: Parcel) -> "RRef[Any]":
        """Takes a reference out of a message.

        Raises:
          RpcError: It is not to be had: the message was given up by its sender, or the
            value was freed because the one who gave it is lost.
        """
        self._keeper.start()
        self._miss(ref.owner)
        with self._lock:
            taken, effects = self._protocol.take(incarnation_of(parcel.worker), ref)
            if isinstance(taken, Held) and taken.pending:
                wait = self._waits[taken.fork] = Future()
                parcel.unsettled = [*parcel.unsettled, wait]
        self._perform(effects)
        if taken is None:
            raise RpcError(_freed(ref.rref))
        if isinstance(taken, Entry):
            return self.handle(ref.rref, cell=taken.cell)
        return self.handle(ref.rref, held=taken)

    def undelivered(self, parcel: Parcel) -> None:
        """The message with these references is lost, or may be."""
        if not parcel.forks:
            return
        to = incarnation_of(parcel.worker)
        self._do(lambda p: [e for f in parcel.forks for e in p.undelivered(f, to)])

    def answer(self, execution: "Execution", parcel: Parcel) -> None:
        """An answer brings references; if it is given up, they are undelivered.

        The call is remembered until they have all arrived.
        """
        with self._lock:
            self._answers.update(dict.fromkeys(parcel.forks, execution))
        execution.bring(lambda: self.undelivered(parcel))

    def decline(self, tree: Any, giver: WorkerInfo) -> None:
        """Takes and drops the references in an answer that could not be read."""
        refs, of = list(refs_in(self.agent.codec, tree)), incarnation_of(giver)
        for ref in refs:
            self._miss(ref.owner)
        if refs:
            self._do(lambda p: [e for r in refs for e in p.on_take(of, Take(r))])

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Has `action()` called in so many seconds; never, once closed."""
        self._keeper.later(seconds, action)

    # --- workers come, go and end ---

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """A worker is lost or has left."""
        with self._lock:
            if self.released:
                self._leaks += self._held_by(worker.incarnation)
            effects = self._protocol.gone(incarnation_of(worker), reason)
            for fork, execution in list(self._answers.items()):
                if execution.caller.incarnation == worker.incarnation:
                    del self._answers[fork]
        self.post.forget(incarnation_of(worker))
        self._perform(effects, WorkerLost(worker.name, "RRef creation", reason))

    def release(self, deadline: "Deadline", seconds: float) -> None:
        """Gives up all references, and waits until everybody concerned knows.

        Args:
          deadline: When to go on without.
          seconds: How long to wait at most.
        """
        with self._lock:
            self.released = True
            held = list(self._protocol.holdings)
        self._drop(held)
        left = deadline.remaining()
        until = time.monotonic() + (seconds if left is None else min(left, seconds))
        with self._lock:
            while not self._at_rest() and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def leaks(self) -> list[str]:
        """Values of this worker that others still hold although all were released."""
        with self._lock:
            return [*self._leaks, *self._held_by(None)]

    def counts(self) -> dict[str, int]:
        """For `rpc.debug_info`."""
        with self._lock:
            protocol = self._protocol
            return {
                "num_owner_rrefs": len(protocol.owned),
                "num_forks": protocol.owned.forks,
                "num_forks_under_way": len(protocol.transit),
                "num_user_rrefs": len(protocol.holdings),
                "num_pending_users": protocol.holdings.pending,
                "num_pending_futures": len(self._waits),
            }

    def close(self) -> None:
        """Ends its thread."""
        self.released = True
        self._keeper.close()

    # --- inside ---

    def _put(self, ref: Ref, parcel: Parcel) -> Ref:
        parcel.forks = [*parcel.forks, ref.fork]
        return ref

    def _do(self, event: Callable[[Protocol], Effects]) -> None:
        with self._lock:
            effects = event(self._protocol)
        self._perform(effects)

    def _drop(self, forks: Sequence[Held]) -> None:
        with self._lock:
            effects = [e for held in forks for e in self._protocol.drop(held)]
        self._perform(effects)

    def _perform(self, effects: Effects, never: Exception | None = None) -> None:
        for effect in effects:
            if isinstance(effect, Settled):
                self._settle(effect.held)
            elif isinstance(effect, Never):
                error = never or RpcError(f"RRef creation failed: {effect.reason}")
                fail(effect.cell, error, "", self.agent.codec.functions)
            elif not isinstance(effect, Freed):  # that one dies with the list
                self.post.send(effect.to, effect.message)
        if self.released:
            with self._lock:
                self._changed.notify_all()

    def _settle(self, held: Held) -> None:
        with self._lock:
            wait = self._waits.pop(held.fork, None)
        if wait is None:
            return
        if held.failed is None:
            wait.set_result(None)
        else:
            wait.set_exception(self.failure(held, "the wait for its confirmation"))

    def owner(self, held: Held) -> WorkerInfo:
        """The worker that has the value.

        Raises:
          RpcError: It was gone before this worker joined.
        """
        peer = self.agent.directory.of_incarnation(held.owner)
        if peer is None:
            raise RpcError(held.failed)
        return peer.info

    def failure(self, held: Held, operation: str) -> RpcError:
        """Why a reference cannot be used."""
        owner = self.agent.directory.of_incarnation(held.owner)
        if owner is not None and owner.departed is not None:
            name, reason = owner.info.name, owner.departed
            return WorkerLost(name, f"{operation} of an RRef", reason)
        return RpcError(held.failed)

    # --- messages ---

    def _receive(
        self, sender: int, messages: Sequence[Message]
    ) -> tuple[list[Any], Callable[[], None]]:
        answers: list[Any] = []
        effects: Effects = []
        with self._lock:
            for message in messages:
                answer, more = self._react(sender, message)
                answers.append(answer)
                effects += more
        return answers, lambda: self._perform(effects)

    def _react(self, sender: int, message: Message) -> tuple[Any, Effects]:
        protocol = self._protocol
        match message:
            case Fork():
                counted = protocol.on_fork(sender, message)
                return (None if counted else _freed(message.rref)), []
            case Accept():
                self._answers.pop(message.fork, None)
                return None, protocol.on_accept(sender, message)
            case Delete():
                return None, protocol.on_delete(sender, message)
            case Take():
                return None, protocol.on_take(sender, message)
            case Abort():
                if message.rref.created_on != sender:
                    raise ProtocolError("Only its creator may abort a creation.")
                return None, protocol.on_abort(sender, message)

    def _answered(self, message: Message, answer: Any) -> None:
        if isinstance(message, Fork | Abort):
            fork = message.fork
            if isinstance(answer, str):
                self._do(lambda protocol: protocol.refused(fork, answer))
            else:
                self._do(lambda protocol: protocol.counted(fork))
        elif self.released:
            self._perform([])

    def _at_rest(self) -> bool:
        protocol = self._protocol
        under_way = len(protocol.holdings) + len(protocol.transit)
        return not under_way and self.post.idle()

    def _held_by(self, holder: int | None) -> list[str]:
        """Forks that still count, of one worker or of all, in words."""
        return [
            f"{rref} held by {self._name_of(who)!r} as {fork}"
            for rref, entry in self._protocol.owned
            for fork, who in entry.holders.items()
            if holder in (None, who)
        ]

    def _name_of(self, holder: int) -> str | int:
        peer = self.agent.directory.of_incarnation(holder)
        return holder if peer is None else peer.info.name

    def _miss(self, owner: int) -> None:
        """Notes it when an owner was gone before this worker joined."""
        if self.agent.directory.of_incarnation(owner) is None:
            with self._lock:
                self._protocol.gone(owner, "Its owner left before this worker joined.")


def _freed(rref: GloballyUniqueId) -> str:
    return (
        f"The value of {rref} is not there any more: the worker from which this "
        "reference came was lost, or gave up the call, before its owner knew of it."
    )


def refuse_anywhere_else(call: str) -> RpcError:
    """An RRef travels in calls and answers, and nowhere else."""
    rule = "must not contain an RRef: Can not pickle rref in python pickler"
    remedy = "Send it in a call, or return it from one: there its owner counts it."
    return RpcError(requirement(call, rule, "an RRef", remedy))
