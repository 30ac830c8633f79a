"""A worker: the calls that it makes and serves, its peers, its threads and timer."""

import contextlib
import contextvars
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from jdist.rpc.base import current
from jdist.rpc.base.current import DEFAULT, Meta, Operation, moment
from jdist.rpc.base.errors import ProtocolError, RpcError, RpcTimeout
from jdist.rpc.base.future import Future, call_when_done, run_all
from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.timer import Timer
from jdist.rpc.base.worker_info import PeerRecord, WorkerInfo
from jdist.rpc.calls.callee import (
    NESTED,
    TAKE_BACK,
    Callee,
    Execution,
    Handler,
    ServedConnection,
)
from jdist.rpc.calls.outstanding_calls import (
    AsyncCall,
    CallingWorker,
    Contents,
    Outgoing,
    SyncCall,
)
from jdist.rpc.calls.peers import Directory, Peer
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.wire.channel import Channel, ChannelClosed, NotSent, Transport
from jdist.rpc.wire.frame import CALL, REPLY, Frame
from jdist.rpc.wire.in_process import Hub, InProcessTransport
from jdist.rpc.wire.shared_connection import SharedConnection


class Invocation(msgspec.Struct, frozen=True):
    """A function about to be called on another worker (or being called here)."""

    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def unpack(cls, kind: str, body: Any) -> "Invocation":
        """Decodes a call that arrived.

        Raises:
          ProtocolError: `body` is not a call.
        """
        # A peer may send anything.
        if type(body) is tuple and len(body) == 3:
            function, args, kwargs = body
            if callable(function) and type(args) is tuple and type(kwargs) is dict:
                return cls(kind, function, args, kwargs)
        raise ProtocolError("A call has a function, arguments and keywords.")


class Interceptor(Protocol):
    """Sees every user-level call on its way out, at the callee, and back."""

    def request(self, to: WorkerInfo, call: Invocation) -> tuple[Invocation, Meta]:
        """On the caller, before encoding: returns the call to send and its metadata."""

    def execute(
        self,
        caller: WorkerInfo,
        call: Invocation,
        meta: Meta,
        run: Callable[[Invocation], Any],
    ) -> tuple[Any, Meta]:
        """On the callee: runs the call; returns its result and the reply's metadata.

        The result may be a Future when the function is an async_execution one.
        """

    def reply(self, to: WorkerInfo, value: Any, meta: Meta) -> Any:
        """On the caller, after decoding: returns the value for the user."""

    def local(self, value: Any) -> Any:
        """On the owner of a reference: returns the result of `to_here`."""


Gone = Callable[[WorkerInfo, str], None]
"""`gone(worker, reason)`: called when a worker is lost or has left."""


class ExtensionState(dict[str, Any]):
    """State of one worker, by the names of the packages that keep it.

    An entry with a method `counts` adds what that returns to `rpc.debug_info`.

    Args:
      pool: Runs listeners.

    Attributes:
      backward: Runs the backward pass of `RRef.backward`; None without
        `jdist.autograd`, which sets both.
      make_trainable: Makes a trainable module on its owner.
    """

    def __init__(self, pool: ThreadPool) -> None:
        super().__init__()
        # Set by name, because imports run downwards: rpc cannot import autograd.
        self.backward: Callable[..., None] | None = None
        self.make_trainable: Callable[..., Any] | None = None
        self._pool = pool
        self._on_gone: list[Gone] = []
        self._on_close: list[Callable[[], None]] = []

    def on_gone(self, listener: Gone) -> None:
        """Registers `listener(worker, reason)` for workers that are lost or leave.

        It runs on a thread of the pool, after calls to that worker have ended.
        """
        self._on_gone.append(listener)

    def on_close(self, listener: Callable[[], None]) -> None:
        """Registers `listener()` for the end of this worker."""
        self._on_close.append(listener)

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """Notifies listeners that a worker is lost or has left."""
        for listener in tuple(self._on_gone):
            # Each on a thread of its own: a listener may wait, and must not delay
            # others.
            self._pool.run(functools.partial(listener, worker, reason))

    def close(self) -> None:
        """Notifies listeners that this worker ends."""
        for listener in tuple(self._on_close):
            listener()

    def counts(self) -> dict[str, Any]:
        """Counts of all packages, for `rpc.debug_info`."""
        counting = (getattr(part, "counts", None) for part in self.values())
        return {key: n for counts in counting if counts for key, n in counts().items()}


class Agent(CallingWorker):
    """One worker of a group.

    Packages built upon rpc use `register`, `call`, `call_async`, `interceptor` and
    `codec`; what users call is in `jdist.rpc`.

    Args:
      info: Its name and rank.
      transport: Its way to the others; owned by the agent.
      functions: The functions that others may call.
      options: See there.

    Attributes, beside those of `CallingWorker`:
      device: The JAX device on which arrays arrive; None for JAX's default.
      timer: The one timer thread.
      directory: The workers of its group.
      default_timeout: Timeout of calls that give none, in seconds; 0 for no limit.
      interceptor: Called with every user-level call, or None.
      extension_state: The state of packages built upon rpc.
    """

    def __init__(
        self,
        info: WorkerInfo,
        transport: Transport,
        functions: FunctionTable,
        options: RpcOptions,
    ) -> None:
        super().__init__(info, functions, options)
        self.device = getattr(transport, "device", options.device)
        self.directory = Directory(info)
        self.timer = Timer(f"{info.name} timer", self.pool)
        self.alarm = self.timer.alarm(self._expire)
        self.default_timeout = options.timeout
        self.interceptor: Interceptor | None = None
        self.callee = Callee(self)
        self.extension_state = ExtensionState(self.pool)
        self._transport = transport
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        # Calls to oneself need no socket, but refuse what a socket refuses.
        self._loopback = InProcessTransport(info.name, Hub(), options.device)
        for way in (self._loopback, transport):
            if isinstance(way, InProcessTransport):
                way.answerer = self._answer_in_thread_of_caller
            way.serve(self._serve)

    @property
    def address(self) -> Any:
        """The address at which others reach this worker."""
        return self._transport.address

    def register(
        self, kind: str, handler: Handler, limited: bool = False, inline: bool = False
    ) -> None:
        """Registers `handler(caller, body, meta)` for requests of this kind.

        It returns a value, a `Reply` with metadata, or a Future of one.

        Args:
          kind: Kind of the requests.
          handler: The function that answers them.
          limited: Whether it runs functions of the user's: no more of them run for
            programs at a time than `RpcOptions.threads` says. What the library sends
            itself must not wait behind these.
          inline: Whether the thread that reads a shared connection runs it, which saves
            the hand-off to another thread. It must never wait, nor run code of users:
            the connection is not read meanwhile.

        Raises:
          ValueError: The kind has a handler, or `limited` and `inline` are both given.
        """
        self.callee.register(kind, handler, limited, inline)

    # --- the group ---

    def meet(self, members: Iterable[PeerRecord]) -> None:
        """Enters a group with these members, this worker among them."""
        peers = []
        for record in members:
            if record.info == self.info:
                self.info = record.info
                assert self.info.incarnation is not None
                self.references.begin(self.info.incarnation)
            peers.append(self.peer(record))
        self.directory.complete(peers)

    def peer(self, record: PeerRecord) -> Peer:
        """Makes the peer of a worker; its connections are opened on demand."""
        if record.info == self.info:
            own = PeerRecord(record.info, record.info.name, None)
            return Peer(own, self._loopback, self.pool)
        return Peer(record, self._transport, self.pool)

    def drop_peer(self, peer: Peer, reason: str) -> None:
        """Ends calls to and from a worker that has gone."""
        name, incarnation = peer.info.name, peer.info.incarnation
        peer.close(reason)
        # The thread that reads a pooled connection is executing the call, and does not
        # see it close. A function cannot be stopped; what it waits for can.
        for execution in self.outstanding.served():
            if execution.worker.incarnation == incarnation:
                execution.cancel(f"{name!r} is gone: {reason}")
                self.outstanding.end(execution)
        # A shutdown need not wait for this one's own calls: the worker will not come.
        self.outstanding.wake()
        # On the pool: what they complete has users' functions for callbacks.
        self.pool.run(lambda: self.references.gone(peer.info, reason))
        self.extension_state.gone(peer.info, reason)

    # --- calling ---

    def call(
        self,
        to: Any,
        kind: str,
        body: Any,
        timeout: float = DEFAULT,
        meta: Meta | None = None,
    ) -> Any:
        """Asks `to` and waits for the answer.

        Args:
          to: A name, a rank or a WorkerInfo.
          kind: A kind that the callee has registered.
          body: Anything encodable.
          timeout: Seconds; -1 for the default, 0 for no limit.
          meta: Small values by name that travel beside the body.

        Raises:
          RpcTimeout: No answer came in time.
          WorkerLost: The callee is gone.
          Exception: Whatever the handler raised.
        """
        return self.exchange(self.outgoing(to, kind, body, timeout, meta))

    def call_async(
        self,
        to: Any,
        kind: str,
        body: Any,
        timeout: float = DEFAULT,
        meta: Meta | None = None,
    ) -> Future[Any]:
        """Asks `to`; the answer will be in the future, as will the errors of `call`."""
        return self.request(self.outgoing(to, kind, body, timeout, meta))

    def call_function(
        self,
        to: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        operation: Operation,
    ) -> Any:
        """Calls a function as `rpc_sync` does, past the interceptor."""
        body: Any = (function, args, {})
        return self.exchange(
            self.outgoing(to, CALL, body, timeout, operation=operation)
        )

    def outgoing(
        self,
        to: Any,
        kind: str,
        body: Any,
        timeout: float,
        meta: Meta | None = None,
        operation: Operation | None = None,
    ) -> Outgoing:
        """Prepares a request: looks up its destination and computes its deadline.

        Errors name the operation, by default the kind.
        """
        if self.closed:
            raise RpcError(current.why_none())
        peer = self.directory.find(to)
        limit = current.resolve(timeout, self.default_timeout, current.deadline())
        operation = operation or Operation(kind)
        return Outgoing(peer, kind, body, dict(meta or ()), limit, operation)

    def exchange(self, outgoing: Outgoing) -> Any:
        """Sends a request on a pooled connection and waits for the answer."""
        peer, meta = outgoing.peer, outgoing.meta
        message = MessageContext(peer.info, meta, outgoing.operation)
        tree, leaves = self.encode(outgoing.body, message)
        scope = current.scope.get()
        if scope is not None and scope.reading:
            current.check_may_wait()
        execution = None if scope is None else scope.execution
        waiting = SyncCall(outgoing, execution)
        try:
            try:
                self.outstanding.send(waiting)
                if execution is not None:
                    meta = meta | self._cancellable(waiting, peer)
                    execution.begin(waiting)
                due = waiting.run(outgoing.kind, meta, tree, leaves)
                if due is not None:  # several connections are idle now
                    self.alarm.set(due)
            finally:
                self._end(waiting)
        except BaseException as error:
            # Again: an interrupt may have kept the first one from its end.
            self._end(waiting)
            self.undelivered(message)
            if waiting.answer is not None:  # the interrupt came after the answer
                self.references.decline(waiting.answer.tree, peer.info)
            failure = self._failure(waiting, peer, error)
            if failure is None:
                raise
            raise failure from error
        answer = waiting.answer
        assert answer is not None
        if answer.kind != REPLY:
            self.undelivered(message)
        try:
            return self.value_of(answer, outgoing.receive, peer.info)
        except KeyboardInterrupt:
            # The program gets nothing of it, so no finalizer drops what it brought.
            self.references.decline(answer.tree, peer.info)
            raise

    def _end(self, waiting: SyncCall) -> None:
        waiting.release("the call was interrupted")
        if waiting.execution is not None:
            waiting.execution.end(waiting)
        self.outstanding.end(waiting)

    def _failure(
        self, call: SyncCall | AsyncCall, peer: Peer, error: BaseException
    ) -> RpcError | None:
        """The exception for a call whose connection failed; None for other errors."""
        if isinstance(error, ChannelClosed):
            if isinstance(call, SyncCall) and call.given_up is not None:
                return RpcTimeout(call.given_up)
            return self.lost(peer, call.operation, str(error))
        if isinstance(error, TimeoutError):
            return self.timed_out(peer, call.operation, call.deadline)
        return None

    def _cancellable(self, waiting: SyncCall, peer: Peer) -> Meta:
        """Makes a blocking call cancellable out of band; returns metadata for that."""
        # The callee's thread that reads the call's own connection is executing the
        # call, so another request cancels it, by the number in the metadata.
        ticket = next(self._tickets)

        def cancel() -> None:
            # Not under the deadline of the call that was cancelled: it has passed.
            context = contextvars.Context()
            with contextlib.suppress(RpcError):  # this worker was shut down meanwhile
                context.run(self.call_async, peer.info, TAKE_BACK, ticket)

        waiting.take_back = cancel
        return {"ticket": ticket}

    def request(self, outgoing: Outgoing) -> Future[Any]:
        """Sends a request on the shared connection; returns its answer's future."""
        return self.submit(outgoing).future

    def submit(self, outgoing: Outgoing) -> AsyncCall:
        """Sends a request on the shared connection; returns the pending call."""
        message = MessageContext(outgoing.peer.info, outgoing.meta, outgoing.operation)
        tree, leaves = self.encode(outgoing.body, message)
        scope = current.scope.get()
        execution = None if scope is None else scope.execution
        request = AsyncCall(self, outgoing, message, execution)
        meta = current.with_deadline(outgoing.meta, outgoing.deadline)
        if execution is not None:
            # The callee then gives it no place to wait for: see `Callee.needs_place`.
            meta[NESTED] = True
        contents = (outgoing.kind, meta, tree, leaves)
        peer = outgoing.peer
        try:
            # Before it is sent: a shutdown must not find this worker without calls
            # while the request is in flight.
            self.outstanding.send(request)
            if not self._submit(request, peer.shared, contents):
                # Connecting may take long, and this call must not.
                self.pool.run(lambda: self._connect_and_submit(request, peer, contents))
        except BaseException:
            self.outstanding.end(request)
            self.undelivered(request.message)
            raise
        return request

    def _submit(
        self, request: AsyncCall, shared: SharedConnection | None, contents: Contents
    ) -> bool:
        """Sends a request on the shared connection; False if that is not open."""
        if shared is None or shared.closed is not None:
            return False
        try:
            request.submit(shared, contents)
        except NotSent:
            return False
        self.alarm.set(request.deadline.at)
        return True

    def _connect_and_submit(
        self, request: AsyncCall, peer: Peer, contents: Contents
    ) -> None:
        try:
            # The first one may have closed without having been noticed.
            for _ in range(2):
                shared = peer.open_shared(request.deadline)
                if self._submit(request, shared, contents):
                    return
            raise ChannelClosed(shared.closed or "its connection closed")
        except Exception as error:  # noqa: BLE001 - it becomes the future's
            run_all(request.end(None, self._failure(request, peer, error) or error))

    # --- serving ---

    def _serve(self, channel: Channel) -> None:
        # Waits: another worker may learn before this one that this one has joined.
        caller = self.directory.caller(channel.peer, moment(self.options.join_timeout))
        if caller is None or self.closed:
            channel.close(f"{self.info.name!r} does not know {channel.peer!r}")
            return
        ServedConnection(self.callee, channel, caller).read()

    def _answer_in_thread_of_caller(
        self, caller: str, frame: Frame, depth: int
    ) -> Frame | Execution:
        info = self.directory.caller(caller, moment(self.options.join_timeout))
        if info is None or self.closed:
            raise ChannelClosed(f"{self.info.name!r} does not know {caller!r}")
        execution = Execution(info, frame, self.pool)
        try:
            self.callee.begin(execution)
            answer = self.callee.execute(execution, frame, depth)
            if answer is execution:
                call_when_done(
                    execution.answer, lambda: self.outstanding.end(execution)
                )
            else:
                self.outstanding.end(execution)
            return answer
        except BaseException:
            self.outstanding.end(execution)
            raise

    # --- time and end ---

    def _expire(self, now: float) -> float | None:
        peers = self.directory.present()
        connections = [peer.shared for peer in peers]
        moments = [shared.expire(now) for shared in connections if shared is not None]
        moments += [peer.expire(now) for peer in peers]
        return min((at for at in moments if at is not None), default=None)

    def close(self) -> None:
        """Ends the worker at once: channels, threads, sockets. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.ending = self.closed = True
        # In this order: packages may still send, connections wake the threads that
        # wait, and only then can the timer and the pool be joined.
        self.extension_state.close()
        for peer in self.directory.present():
            peer.close("this worker was shut down")
        self._transport.close()
        self._loopback.close()
        self.timer.close()
        self.pool.close(timeout=1.0)


def current_agent() -> Agent:
    """Return the worker as which the calling code acts.

    Raises:
      RpcError: There is none, it was shut down, or there are several to choose from.
    """
    found = current.worker()
    assert isinstance(found, Agent)
    return found


# --- packages built upon rpc, whose installers run for every worker ---

Installer = Callable[[Agent], None]
_installers: dict[str, Installer] = {}
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
_lock = threading.Lock()


def extend(package: str, installer: Installer) -> None:
    """Register `installer(agent)`, called once for every worker of this process.

    Args:
      package: Registers it; a second time changes nothing.
      installer: Gives one worker what the package needs there.
    """
    with _lock:
        if package in _installers:
            return
        _installers[package] = installer
        agents = [agent for agent in _agents if not agent.closed]
    for agent in agents:
        installer(agent)


def equip(agent: Agent) -> None:
    """Runs all installers for a new worker."""
    with _lock:
        # In this order: a package that registers from here on finds the worker itself.
        _agents.add(agent)
        installers = list(_installers.values())
    for installer in installers:
        installer(agent)
