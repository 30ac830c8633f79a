"""One worker's references: runs the protocol's events, effects and waits."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jdist._errors import requirement
from jdist.rpc.base.current import NEVER, Deadline, RunningCall
from jdist.rpc.base.errors import ProtocolError, RpcError, WorkerLost
from jdist.rpc.base.future import Future
from jdist.rpc.base.ids import GloballyUniqueId, IdCounter
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec import codes
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.codec.codes import Tree
from jdist.rpc.rref.messages import (
    KINDS,
    REFERENCE,
    Abort,
    Accept,
    CreationName,
    Delete,
    Fork,
    Message,
    Ref,
    Take,
    pack,
    unpack,
)
from jdist.rpc.rref.owner_value import OwnerValue, fail, new_owner_value
from jdist.rpc.rref.protocol import (
    Effects,
    Freed,
    Never,
    OwnedEntry,
    Protocol,
    Settled,
    UserFork,
)
from jdist.rpc.rref.reliable_delivery import GATHERING, QueuedMessage, ReliableDelivery

T = TypeVar("T")

_LATE_SECONDS = 1.0
"""Seconds after which dropped forks are no longer expected to be on their way."""


class Handle(NamedTuple):
    """The parts of an `RRef`.

    Attributes:
      references: References of the worker that has it.
      rref: Id of the reference.
      owner_value: On the owner, where the value is or will be; else None.
      user_fork: Elsewhere, what the owner counts; else None.
      creation: For a reference by `remote`, done when that call has ended.
      until: Time at which the creation will have ended.
    """

    references: "References"
    rref: GloballyUniqueId
    owner_value: OwnerValue | None = None
    user_fork: UserFork | None = None
    creation: Future[None] | None = None
    until: Deadline = NEVER

    @property
    def agent(self) -> Agent:
        """The worker that has the reference."""
        return self.references.agent

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        if self.user_fork is None:
            return self.agent.info
        return self.references.owner(self.user_fork)


class References:
    """All references of one worker: of its own values, and of others' values.

    Args:
      agent: The worker.

    Attributes:
      agent: The worker.
      released: Whether every reference was given up, because the worker shuts down.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.released = False
        self.begin(agent.info.id)
        # `with` this lock, not the condition: see `interrupt_safe_lock`.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waits: dict[GloballyUniqueId, Future[None]] = {}
        self._answers: dict[GloballyUniqueId, RunningCall] = {}
        self._leaks: list[str] = []
        self._watched: dict[GloballyUniqueId, object] = {}
        self._unused: deque[UserFork] = deque()
        self._gathering_until = 0.0
        # Effects of events that no thread has begun to perform.
        self._due: deque[tuple[Effects, Exception | None]] = deque()
        self._performing = 0
        self.delivery = ReliableDelivery(agent)
        for kind, name in KINDS.items():
            read = functools.partial(unpack, kind)
            self.delivery.handle(name, read, self._receive, inline=True)

    def ask(self, question: Callable[[Protocol], T]) -> T:
        """Asks the protocol something that has no effects."""
        with self._lock:
            return question(self._protocol)

    def begin(self, incarnation: int) -> None:
        """Restarts with the incarnation that the group has given this worker."""
        ids = IdCounter(incarnation)
        self._protocol = Protocol(incarnation, ids, new_owner_value)

    # --- values of this worker ---

    def find(self, rref: GloballyUniqueId) -> OwnerValue:
        """Finds the place of a value, which may not be created yet.

        Raises:
          RpcError: It was freed.
        """
        entry = self.ask(lambda protocol: protocol.owned.find(rref))
        if entry is None:
            raise RpcError(_freed(rref))
        return entry.owner_value

    def on_create(self, creator: WorkerInfo, name: CreationName) -> OwnerValue:
        """Makes the place for a value that another worker asked to be created.

        Raises:
          RpcError: The request was given up by the creator, which is known already.
        """
        of = incarnation_of(creator)
        entry = self.ask(lambda protocol: protocol.on_create(of, name))
        if entry is None:
            raise RpcError("RRef creation was given up before the request arrived.")
        return entry.owner_value

    # --- values of others ---

    def drop_with(self, handle: object, user_fork: UserFork) -> None:
        """Drops a fork once the program's object `handle` is collected."""
        # By the timer: no Python code may run where a reference is collected, because
        # that thread may hold any lock.
        self._watched[user_fork.fork] = self.agent.timer.when_collected(
            handle, lambda now: self.drop(user_fork)
        )

    def drop(self, user_fork: UserFork) -> None:
        """Schedules a fork to be dropped; idempotent."""
        self._watched.pop(user_fork.fork, None)
        # A deque, whose `append` is one step: this runs on the timer and elsewhere.
        self._unused.append(user_fork)
        now = time.monotonic()
        if now >= self._gathering_until:
            # A message for each by itself would cost as much as a call. The moment
            # passes: an interrupt before `later` must not stop all that come after it.
            self._gathering_until = now + _LATE_SECONDS
            self.agent.timer.later(GATHERING, self._drop_unused)

    def _drop_unused(self) -> None:
        # Reset first: forks dropped from here on make an appointment of their own.
        self._gathering_until = 0.0
        forks = []
        while self._unused:
            forks.append(self._unused.popleft())
        self._drop(forks)

    # --- giving and taking ---

    def give(self, handle: Handle, message: MessageContext) -> Ref:
        """Adds a reference to a message."""
        protocol, to = self._protocol, incarnation_of(message.worker)
        with self._lock:
            if handle.user_fork is None:
                ref = protocol.give_owned(handle.rref, handle.owner_value, to)
            else:
                ref = protocol.give(handle.user_fork, to)
            message.forks = [*message.forks, ref.fork]
            return ref

    def take(self, ref: Ref, message: MessageContext) -> Handle:
        """Takes a reference from a message.

        Raises:
          RpcError: It is not to be had: the message was given up by its sender, or the
            value was freed because its giver is lost.
        """
        self._miss(ref.owner)
        taken: UserFork | OwnedEntry | None = None

        def event(protocol: Protocol) -> Effects:
            nonlocal taken
            taken, effects = protocol.take(incarnation_of(message.worker), ref)
            if isinstance(taken, UserFork) and taken.pending:
                wait = self._waits[taken.fork] = Future()
                message.unsettled = [*message.unsettled, wait]
            return effects

        self.do(event)
        if taken is None:
            raise RpcError(_freed(ref.rref))
        if isinstance(taken, OwnedEntry):
            return Handle(self, ref.rref, owner_value=taken.owner_value)
        return Handle(self, ref.rref, user_fork=taken)

    def undelivered(self, message: MessageContext) -> None:
        """Handles a message with references that is, or may be, lost."""
        if not message.forks:
            return
        to = incarnation_of(message.worker)
        self.do(lambda p: [e for f in message.forks for e in p.undelivered(f, to)])

    def answer(self, execution: RunningCall, message: MessageContext) -> None:
        """Registers an answer with references: undelivered if the call is given up.

        The call is remembered until they have all arrived.
        """
        with self._lock:
            self._answers.update(dict.fromkeys(message.forks, execution))
        execution.bring(lambda: self.undelivered(message))

    def decline(self, tree: Tree, giver: WorkerInfo) -> None:
        """Takes and drops the references in an answer that could not be read."""
        refs, of = list(self._refs_in(tree)), incarnation_of(giver)
        for ref in refs:
            self._miss(ref.owner)
        if refs:
            self.do(lambda p: [e for ref in refs for e in p.decline(of, ref)])

    # --- workers come, go and end ---

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """Handles the loss or departure of a worker."""
        with self._lock:
            if self.released:
                self._leaks += self._held_by(worker.incarnation)
            for fork, execution in list(self._answers.items()):
                if execution.worker.incarnation == worker.incarnation:
                    del self._answers[fork]
        never = WorkerLost(worker.name, "RRef creation", reason)
        self.do(lambda p: p.gone(incarnation_of(worker), reason), never)
        self.delivery.forget(incarnation_of(worker))

    def release(self, deadline: Deadline, seconds: float) -> None:
        """Drops all references and waits until all owners know.

        Args:
          deadline: When to stop waiting.
          seconds: How long to wait at most.
        """
        with self._lock:
            self.released = True
            user_forks = list(self._protocol.user_forks.values())
        self._drop(user_forks)
        left = deadline.remaining()
        until = time.monotonic() + (seconds if left is None else min(left, seconds))
        with self._lock:
            while not self._at_rest() and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def leaks(self) -> list[str]:
        """Describes values of this worker that others still hold after `release`."""
        with self._lock:
            return [*self._leaks, *self._held_by(None)]

    def counts(self) -> dict[str, int]:
        """Counts of references, for `rpc.debug_info`."""
        with self._lock:
            protocol = self._protocol
            return {
                "num_owner_rrefs": len(protocol.owned),
                "num_forks": protocol.owned.forks,
                "num_forks_under_way": protocol.forks_in_transit,
                "num_user_rrefs": len(protocol.user_forks),
                "num_pending_users": sum(
                    one.pending for one in protocol.user_forks.values()
                ),
                "num_pending_futures": len(self._waits),
            }

    def close(self) -> None:
        """Ends the delivery of messages."""
        self.released = True
        self.delivery.close()

    # --- inside ---

    def do(
        self, event: Callable[[Protocol], Effects], never: Exception | None = None
    ) -> None:
        """Applies an event to the protocol and performs its effects.

        Args:
          event: An event of the protocol.
          never: The exception of `Never`, where that is a particular one.
        """
        try:
            with self._lock:
                effects = event(self._protocol)
                if effects:  # to be performed outside of the lock, since that may block
                    self._due.append((effects, never))
            # An interrupt would lose what the main thread is about to send.
            if threading.current_thread() is threading.main_thread():
                self._perform_elsewhere()
            else:
                self._perform_due()
        except BaseException:
            self._perform_elsewhere()
            raise

    def _perform_elsewhere(self) -> None:
        if self._due:
            self.agent.pool.run(self._perform_due)

    def _perform_due(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    break
                effects, never = self._due.popleft()
                # Counted, so that `release` does not end before it was sent.
                self._performing += 1
            try:
                self._perform(effects, never)
            finally:
                del effects  # and with it the values that are freed
                with self._lock:
                    self._performing -= 1
        self._wake()

    def _wake(self) -> None:
        """Wakes `release`, which then checks again."""
        if self.released:
            with self._lock:
                self._changed.notify_all()

    def _drop(self, forks: Sequence[UserFork]) -> None:
        self.do(lambda p: [e for user_fork in forks for e in p.drop(user_fork)])

    def _perform(self, effects: Effects, never: Exception | None = None) -> None:
        letters: dict[tuple[int, bool], list[QueuedMessage]] = {}
        for effect in effects:
            if isinstance(effect, Settled):
                self._settle(effect.user_fork)
            elif isinstance(effect, Never):
                error = never or RpcError(f"RRef creation failed: {effect.reason}")
                fail(effect.owner_value, error, "", self.agent.codec.functions)
            elif not isinstance(effect, Freed):  # a freed value dies with the list
                # An `Accept` may be late: its giver only keeps its own fork for longer.
                gather = isinstance(effect.message, Accept)
                letter = self._letter(effect.message)
                letters.setdefault((effect.to, gather), []).append(letter)
        # Together: each sending wakes a thread, and a thousand references may be
        # dropped at once.
        for (to, gather), messages in letters.items():
            self.delivery.send_all(to, messages, gather)

    def _settle(self, user_fork: UserFork) -> None:
        with self._lock:
            wait = self._waits.pop(user_fork.fork, None)
        if wait is None:
            return
        if user_fork.failed is None:
            wait.set_result(None)
        else:
            wait.set_exception(self.failure(user_fork, "the wait for its confirmation"))

    def owner(self, user_fork: UserFork) -> WorkerInfo:
        """The worker that has the value.

        Raises:
          RpcError: It was gone before this worker joined.
        """
        peer = self.agent.directory.of_incarnation(user_fork.owner)
        if peer is None:
            raise RpcError(user_fork.failed)
        return peer.info

    def failure(self, user_fork: UserFork, operation: str) -> RpcError:
        """The exception for the use of a reference that has failed."""
        owner = self.agent.directory.of_incarnation(user_fork.owner)
        if owner is not None and owner.departed is not None:
            name, reason = owner.info.name, owner.departed
            return WorkerLost(name, f"{operation} of an RRef", reason)
        return RpcError(user_fork.failed)

    # --- messages ---

    def _letter(self, message: Message) -> QueuedMessage:
        answered = functools.partial(self._answered, message)
        return QueuedMessage(KINDS[type(message)], pack(message), answered, self._wake)

    def _receive(
        self, sender: WorkerInfo, messages: Sequence[Message]
    ) -> tuple[list[Any], Callable[[], None] | None]:
        with self._lock:
            answers, more_to_do = self._react_to_all(incarnation_of(sender), messages)
        return answers, self._perform_due if more_to_do or self.released else None

    def _react_to_all(
        self, sender: int, messages: Sequence[Message]
    ) -> tuple[list[Any], bool]:
        """Returns the answers, and whether effects are due."""
        # A function of its own, so that its caller, which may be the thread that reads
        # a connection, keeps no freed value: that may run a user's destructor.
        answers: list[Any] = []
        effects: Effects = []
        for message in messages:
            answer, more = self._react(sender, message)
            answers.append(answer)
            effects += more
        if effects:
            self._due.append((effects, None))
        return answers, bool(effects)

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
            refusal = answer if isinstance(answer, str) else None
            self.do(lambda protocol: protocol.answered(message.fork, refusal))
        else:
            self._wake()

    def _at_rest(self) -> bool:
        protocol = self._protocol
        under_way = len(protocol.user_forks) + protocol.forks_in_transit
        performed = not self._due and not self._performing
        return performed and not under_way and self.delivery.idle()

    def _held_by(self, holder: int | None) -> list[str]:
        """Forks that still count, of one worker or of all, in words."""
        return [
            f"{rref} held by {self._name_of(one)!r} as {fork}"
            for rref, entry in self._protocol.owned
            for fork, one in entry.holders.items()
            if holder in (None, one)
        ]

    def _name_of(self, holder: int) -> str | int:
        peer = self.agent.directory.of_incarnation(holder)
        return holder if peer is None else peer.info.name

    def _miss(self, owner: int) -> None:
        """Records an owner that was gone before this worker joined."""
        if self.agent.directory.of_incarnation(owner) is None:
            with self._lock:
                self._protocol.gone(owner, "Its owner left before this worker joined.")

    def _refs_in(self, tree: Tree) -> Iterator[Ref]:
        """Yields the references in a tree that could not be decoded as a whole."""
        rest = [tree]
        while rest:
            node = rest.pop()
            if type(node) is not list:
                continue
            if node[:2] == [codes.REGISTERED, REFERENCE]:
                try:
                    yield unpack(Ref, self.agent.codec.decode(node[2], ()))
                except (IndexError, ProtocolError):
                    continue
            rest += node


def _freed(rref: GloballyUniqueId) -> str:
    return (
        f"The value of {rref} is not there any more: the worker from which this "
        "reference came was lost, or gave up the call, before its owner knew of it."
    )


def refuse_anywhere_else(call: str) -> RpcError:
    """Makes the error for an RRef outside of a call or an answer."""
    rule = "must not contain an RRef: Can not pickle rref in python pickler"
    remedy = "Send it in a call, or return it from one: there its owner counts it."
    return RpcError(requirement(call, rule, "an RRef", remedy))
