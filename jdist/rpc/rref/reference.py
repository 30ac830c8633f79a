"""`RRef`: a reference to a value that lives on one worker."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from jdist._errors import requirement
from jdist.rpc.base.deadline import DEFAULT, NEVER, Deadline
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.future import Future, error_of
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls import function_calls
from jdist.rpc.calls.agent import current_agent
from jdist.rpc.rref import creation, fetch
from jdist.rpc.rref.messages import Ref
from jdist.rpc.rref.owner_value import OwnerValue, new_owner_value
from jdist.rpc.rref.proxy import Proxy
from jdist.rpc.rref.references import References
from jdist.rpc.rref.user_fork import UserFork

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on one worker, its *owner*; others are *users* of it.

    The value stays where it is. References to it can be sent in calls and answers, on
    their own and inside of other values. The owner keeps the value as long as a
    reference to it is in use anywhere, on the way, or in its own program. When a worker
    dies, its values die with it, and using a reference to one raises `WorkerLost`.

    `rpc.remote` makes one for a value that another worker shall create. The constructor
    makes one for a value that is here, of any kind.

    Args:
      value: What the reference is to. It needs to be sendable only for `to_here`.

    Raises:
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.rpc.RRef`. Unlike there, a worker's death ends nothing
    but its own references, and a reference that was lost on its way is not leaked.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     total = rpc.remote("worker1", sum, args=([1, 2, 3],))
      ...     total.to_here(), total.owner_name(), rpc.RRef(7).local_value()
      (6, 'worker1', 7)
    """

    __slots__ = (
        "__weakref__",
        "_creation",
        "_owner_value",
        "_references",
        "_rref",
        "_type",
        "_until",
        "_user_fork",
    )

    _references: References
    _rref: GloballyUniqueId
    _owner_value: OwnerValue | None
    _user_fork: UserFork | None
    _creation: Future[None] | None
    _type: Future[type] | None
    _until: Deadline

    def __init__(self, value: T) -> None:
        references = current_agent().references
        owner_value: Future[T] = new_owner_value()
        owner_value.set_result(value)
        self._set(references, references.name(), owner_value=owner_value)

    @classmethod
    def _make(
        cls,
        references: References,
        rref: GloballyUniqueId,
        owner_value: OwnerValue | None = None,
        user_fork: UserFork | None = None,
        creation: Future[None] | None = None,
        until: Deadline = NEVER,
    ) -> "RRef[Any]":
        made: RRef[Any] = object.__new__(cls)
        made._set(references, rref, owner_value, user_fork, creation, until)
        return made

    def _set(
        self,
        references: References,
        rref: GloballyUniqueId,
        owner_value: OwnerValue | None = None,
        user_fork: UserFork | None = None,
        creation: Future[None] | None = None,
        until: Deadline = NEVER,
    ) -> None:
        self._references = references
        self._rref = rref
        self._owner_value = owner_value
        self._user_fork = user_fork
        self._creation = creation
        self._type = None
        self._until = until
        if user_fork is not None:
            finalizer = weakref.finalize(self, references.drop, user_fork)
            finalizer.atexit = False

    # --- who and where ---

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        if self._user_fork is None:
            return self._references.agent.info
        return self._references.owner(self._user_fork)

    def owner_name(self) -> str:
        """That worker's name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self._user_fork is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this reference.

        That of `remote` is confirmed when the value has been created. One that came as
        an argument always is: the function does not start before.
        """
        return self._user_fork is None or self._user_fork.counted

    def creation(self) -> Future[None]:
        """Done when the call by which `remote` asked for the value has ended.

        It raises what went wrong with the call: RpcTimeout, WorkerLost, a function that
        is forbidden. What the function itself raised comes with `to_here`. For any
        other reference it is done from the beginning.

        Source: `torch.distributed.rpc.RRef._get_future`.
        """
        if self._creation is None:
            self._creation = new_owner_value()
            self._creation.set_result(None)
        return self._creation

    # --- the value ---

    def to_here(self, timeout: float = DEFAULT) -> T:
        """The value: itself on its owner, elsewhere a new copy each time.

        It is waited for if it has not been created yet. A variable of `jdist.autograd`
        is only where it is: within a context one gets its recorded value, outside of
        one its tree of arrays, on its owner as elsewhere. The variable itself is
        `local_value()`.

        Args:
          timeout: Seconds; -1 for the default, 0 for no limit.

        Raises:
          RpcTimeout: It took longer; or the reference's creation did, see `remote`,
            which is not waited for beyond its own limit.
          WorkerLost: The owner is gone.
          RpcError: RPC was shut down.
          Exception: What the function raised that should have created the value.
        """
        if self._owner_value is not None:
            agent = self._references.agent
            value = fetch.here(self._owner_value, agent, timeout)
            return (
                value if agent.interceptor is None else agent.interceptor.local(value)
            )
        with self._using("to_here()"):
            return fetch.fetch(self, timeout)

    def local_value(self) -> T:
        """The value itself, not a copy; on its owner only.

        Raises:
          RpcError: This is not the owner.
          Exception: What the function raised that should have created the value.
        """
        if self._owner_value is None:
            assert self._user_fork is not None
            raise RpcError(
                f"For UserRRef(rref_id={self._rref}, fork_id={self._user_fork.fork}), "
                f"can't call local_value() (localValue() in torch) on user "
                f"{self._references.agent.info}. Call it on owner {self.owner()}, or "
                "to_here() for a copy."
            )
        return fetch.here(self._owner_value, self._references.agent, DEFAULT)

    def value_type(self, timeout: float = DEFAULT, blocking: bool = True) -> Any:
        """The type of the value; the owner is asked once and the answer is kept.

        Args:
          timeout: Seconds; -1 for the default, 0 for no limit.
          blocking: Whether to wait. Otherwise a future is returned, the same each time.

        Raises:
          ForbiddenFunction: The type is none that this worker can import and may name.
          Exception: As `to_here`.

        Source: `torch.distributed.rpc.RRef._get_type`.
        """
        kind = self._type
        if kind is None or (kind.done() and error_of(kind) is not None):
            with self._using("value_type()"):
                kind = self._type = fetch.value_type(self, timeout)
        if not blocking:
            return kind
        try:
            return kind.wait(timeout)
        except BaseException:
            self._type = None  # or its exception keeps this reference alive
            raise

    # --- calling its methods ---

    def rpc_sync(self, timeout: float = DEFAULT) -> Proxy:
        """Calls methods of the value where it is: `rref.rpc_sync().method(*args)`.

        The public methods of its class can be called, `proxy(*args)` calls the value
        itself. Each call is one `rpc.rpc_sync` to the owner, and waits there for the
        value to be created.

        Args:
          timeout: Of each call, as for `rpc.rpc_sync`.

        Source: `torch.distributed.rpc.RRef.rpc_sync`.

        Example:
          >>> from jdist import rpc
          >>> with rpc.local_cluster(["worker0", "worker1"]):
          ...     names = rpc.remote("worker1", list, args=(("x", "y"),))
          ...     names.rpc_sync().append("z")
          ...     names.rpc_sync().index("z")
          2
        """
        return Proxy(self, function_calls.rpc_sync, timeout)

    def rpc_async(self, timeout: float = DEFAULT) -> Proxy:
        """As `rpc_sync`, but each call returns a Future of the result."""
        return Proxy(self, function_calls.rpc_async, timeout)

    def remote(self, timeout: float = DEFAULT) -> Proxy:
        """As `rpc_sync`, but each call returns an RRef of the result, on the owner."""
        return Proxy(self, creation.remote, timeout)

    def backward(self, context_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass from the value; see `jdist.autograd`.

        Raises:
          RpcError: `jdist.autograd` has not been imported.
        """
        run = self._references.backward
        if run is None:
            remedy = "Import jdist.autograd on every worker before initializing RPC."
            raise RpcError(f"RRef.backward is a part of jdist.autograd. {remedy}")
        run(self, context_id, retain_graph)

    # --- inside ---

    def _give(self, references: References, message: MessageContext) -> Ref:
        """Puts it into a message of the worker that has these references."""
        if references is not self._references:
            rule = f"must belong to the worker that sends it, {references.agent.info}"
            got = f"{self} of {self._references.agent.info}"
            remedy = "Make the call as its worker: `with rpc.use_worker(name):`."
            raise ValueError(requirement("rpc(rref)", rule, got, remedy))
        if self._owner_value is not None:
            return self._references.give_owned(self._rref, self._owner_value, message)
        assert self._user_fork is not None
        with self._using("fork an UserRRef"):
            return self._references.give(self._user_fork, message)

    @contextlib.contextmanager
    def _using(self, operation: str) -> Iterator[None]:
        """Refuses what cannot be done with this reference any more."""
        user_fork = self._user_fork
        if user_fork is None:
            yield
            return
        references = self._references
        if references.released:
            what = (
                "Cannot call " + operation + ("" if "fork" in operation else " on it")
            )
            raise RpcError(f"{what} after deletion. RPC was shut down on this worker.")
        if user_fork.failed is not None:
            raise references.failure(user_fork, operation)
        if self._creation is not None and self._creation.done():
            creation.check(self._creation, references.agent.codec.functions)
        yield

    def __str__(self) -> str:
        if self._user_fork is None:
            return f"OwnerRRef({self._rref})"
        return f"UserRRef(RRefId = {self._rref}, ForkId = {self._user_fork.fork})"

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise RpcError(
            requirement(
                "pickle(rref)",
                "must not be done, nor copies be made: Can not pickle rref in python "
                "pickler",
                str(self),
                "Send it in a call, or return it from one: there its owner counts it.",
            )
        )
