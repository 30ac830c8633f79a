"""`RRef`, a reference to a value on one worker, and `remote`, which makes one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jdist._errors import requirement, value_error
from jdist.rpc.base.current import DEFAULT
from jdist.rpc.base.errors import ProtocolError, RpcError
from jdist.rpc.base.future import Future, error_of
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls import function_calls
from jdist.rpc.calls.agent import Agent, Invocation, current_agent, extend
from jdist.rpc.calls.outstanding_calls import Submitted
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.rref import creation, fetch
from jdist.rpc.rref.creation import CREATE, Creation, check
from jdist.rpc.rref.messages import REFERENCE, Ref, pack, unpack
from jdist.rpc.rref.owner_value import new_owner_value
from jdist.rpc.rref.protocol import Protocol
from jdist.rpc.rref.proxy import Method, Proxy
from jdist.rpc.rref.references import Handle, References, refuse_anywhere_else

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
      value: The referenced value. It needs to be sendable only for `to_here`.

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

    __slots__ = ("__weakref__", "_asked", "_creation", "_handle", "_type")

    def __init__(self, value: T) -> None:
        references: References = current_agent().references
        place: Future[T] = new_owner_value()
        place.set_result(value)
        self._set(Handle(references, references.ask(Protocol.name), owner_value=place))

    @classmethod
    def _of(cls, handle: Handle) -> "RRef[Any]":
        made: RRef[Any] = object.__new__(cls)
        made._set(handle)
        return made

    def _set(self, handle: Handle) -> None:
        self._asked: Submitted | None = None
        self._handle = handle
        self._creation = handle.creation
        self._type: Future[type] | None = None
        if handle.user_fork is not None:
            handle.references.drop_with(self, handle.user_fork)

    # --- identity ---

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._handle.owner()

    def owner_name(self) -> str:
        """That worker's name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self._handle.user_fork is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this reference.

        A reference made by `remote` is confirmed when the value has been created. One
        that came as an argument always is: the function does not start before.
        """
        fork = self._handle.user_fork
        return fork is None or fork.counted

    def creation(self) -> Future[None]:
        """A future that is done when the call made by `remote` has ended.

        It raises the failure of the call: RpcTimeout, WorkerLost, a forbidden function.
        An exception of the function itself is raised by `to_here`. For any other
        reference the future is done from the beginning.

        Source: `torch.distributed.rpc.RRef._get_future`.
        """
        if self._creation is None:
            self._creation = new_owner_value()
            self._creation.set_result(None)
        return self._creation

    # --- the value ---

    def to_here(self, timeout: float = DEFAULT) -> T:
        """Returns the value itself on its owner, elsewhere a new copy each time.

        Waits for a value that has not been created yet. A variable of `jdist.autograd`
        never leaves its owner: within a context the result is its recorded value,
        outside of one its tree of arrays, on its owner as elsewhere. The variable
        itself is `local_value()`.

        Args:
          timeout: Seconds; -1 for the default, 0 for no limit.

        Raises:
          RpcTimeout: It took longer; or the reference's creation did, see `remote`,
            which is not waited for beyond its own limit.
          WorkerLost: The owner is gone.
          RpcError: RPC was shut down.
          Exception: What the function raised that should have created the value.
        """
        agent, place = self._handle.agent, self._handle.owner_value
        if place is None:
            self._check_usable("to_here()")
            return fetch.fetch(self._handle, fetch_call(self), timeout, self._asked)
        value = fetch.local(place, agent, timeout)
        return value if agent.interceptor is None else agent.interceptor.local(value)

    def local_value(self) -> T:
        """Returns the value itself, not a copy; on its owner only.

        Raises:
          RpcError: This is not the owner.
          Exception: What the function raised that should have created the value.
        """
        agent, place = self._handle.agent, self._handle.owner_value
        if place is None:
            fork = self._handle.user_fork
            assert fork is not None
            raise RpcError(
                f"For UserRRef(rref_id={fork.rref}, fork_id={fork.fork}), can't call "
                f"local_value() (localValue() in torch) on user {agent.info}. Call it "
                f"on owner {self.owner()}, or to_here() for a copy."
            )
        return fetch.local(place, agent, DEFAULT)

    def value_type(self, timeout: float = DEFAULT, blocking: bool = True) -> Any:
        """Returns the value's type; the owner is asked once and the answer is cached.

        Args:
          timeout: Seconds; -1 for the default, 0 for no limit.
          blocking: Whether to wait. Otherwise a future is returned, the same each time.

        Raises:
          ForbiddenFunction: This worker cannot import the type, or must not name it.
          Exception: As `to_here`.

        Source: `torch.distributed.rpc.RRef._get_type`.
        """
        kind = self._type
        if kind is None or (kind.done() and error_of(kind) is not None):
            self._check_usable("value_type()")
            kind = self._type = fetch.value_type(self._handle, timeout)
        if not blocking:
            return kind
        try:
            return kind.wait(timeout)
        except BaseException:
            # The exception's traceback refers to this reference, which would then never
            # be collected.
            self._type = None
            raise

    # --- calling its methods ---

    def rpc_sync(self, timeout: float = DEFAULT) -> Proxy:
        """Calls methods of the value where it is: `rref.rpc_sync().method(*args)`.

        The public methods of its class can be called, `proxy(*args)` calls the value
        itself. Each call is one `rpc.rpc_sync` to the owner, and waits there for the
        value to be created.

        Args:
          timeout: Timeout of each call, as for `rpc.rpc_sync`.

        Source: `torch.distributed.rpc.RRef.rpc_sync`.

        Example:
          >>> from jdist import rpc
          >>> with rpc.local_cluster(["worker0", "worker1"]):
          ...     names = rpc.remote("worker1", list, args=(("x", "y"),))
          ...     names.rpc_sync().append("z")
          ...     names.rpc_sync().index("z")
          2
        """
        return self._proxy(function_calls.rpc_sync, timeout)

    def rpc_async(self, timeout: float = DEFAULT) -> Proxy:
        """As `rpc_sync`, but each call returns a Future of the result."""
        return self._proxy(function_calls.rpc_async, timeout)

    def remote(self, timeout: float = DEFAULT) -> Proxy:
        """As `rpc_sync`, but each call returns an RRef of the result, on the owner."""
        return self._proxy(remote, timeout)

    def backward(self, context_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass from the value; see `jdist.autograd`.

        Raises:
          RpcError: `jdist.autograd` has not been imported.
        """
        run = self._handle.agent.extension_state.backward
        if run is None:
            remedy = "Import jdist.autograd on every worker before initializing RPC."
            raise RpcError(f"RRef.backward is a part of jdist.autograd. {remedy}")
        run(self, context_id, retain_graph)

    # --- inside ---

    def _proxy(self, call: Callable[..., Any], timeout: float) -> Proxy:
        return Proxy(self, self._handle.agent, call, timeout)

    def _give(self, references: References, message: MessageContext) -> Ref:
        """Adds this reference to a message of the worker that has `references`."""
        if references is not self._handle.references:
            rule = f"must belong to the worker that sends it, {references.agent.info}"
            got = f"{self} of {self._handle.agent.info}"
            remedy = "Make the call as its worker: `with rpc.use_worker(name):`."
            raise value_error("rpc(rref)", rule, got, remedy)
        self._check_usable("fork an UserRRef")
        return references.give(self._handle, message)

    def _check_usable(self, operation: str) -> None:
        """Raises if the reference can no longer be used."""
        references, user_fork = self._handle.references, self._handle.user_fork
        if user_fork is None:
            return
        if references.released:
            what = (
                "Cannot call " + operation + ("" if "fork" in operation else " on it")
            )
            raise RpcError(f"{what} after deletion. RPC was shut down on this worker.")
        if user_fork.failed is not None:
            raise references.failure(user_fork, operation)
        if self._creation is not None and self._creation.done():
            check(self._creation, references.agent.codec.functions)

    def __str__(self) -> str:
        rref, fork = self._handle.rref, self._handle.user_fork
        if fork is None:
            return f"OwnerRRef({rref})"
        return f"UserRRef(RRefId = {rref}, ForkId = {fork.fork})"

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


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT,
) -> RRef[Any]:
    """Runs `func(*args, **kwargs)` on the worker `to`, which keeps the result.

    Returns at once, with a reference to the result. It can be used right away:
    `to_here` waits for the value.

    Args:
      to: Name, rank or WorkerInfo; it may be this worker itself.
      func: A function, a class, or a method of an importable class.
      args: Positional arguments, in a tuple or a list.
      kwargs: Keyword arguments, by their names.
      timeout: Seconds for the function to end; -1 for the default, 0 for no limit.

    Raises:
      TypeError, ValueError, ForbiddenFunction: The call itself is wrong.
      RpcError: There is no such worker, or RPC has not been initialized.

    All other errors are raised where the reference is used: the exception of the
    function by `to_here` of every holder, with its own type; RpcTimeout with "RRef
    creation" when the call took too long; WorkerLost when the owner is gone.

    Source: `torch.distributed.rpc.remote`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     rref = rpc.remote("worker1", divmod, args=(7, 2))
      ...     rref.owner_name(), rref.to_here()
      ('worker1', (3, 1))
    """
    agent = current_agent()
    outgoing = function_calls.outgoing(
        agent, to, CREATE, func, args, kwargs, timeout, "remote"
    )
    request = Creation(agent.references, outgoing)
    try:
        # Made before the request is sent: its finalizer gives the value up in any case.
        rref = RRef._of(request.begin())
        rref._asked = request.ask()
    except BaseException as error:
        request.give_up(error)
        raise
    return rref


def fetch_call(rref: RRef[Any]) -> Invocation:
    """The call that interceptors see for `rref.to_here()`."""
    return Invocation(fetch.FETCH, RRef.to_here, (rref,), {})


# --- every worker gets its references ---

_METHOD = "rref.method"


def install(agent: Agent) -> None:
    """Equips a worker with references: makes, sends and receives them."""
    references = References(agent)
    agent.references = references

    def give(rref: RRef[Any], message: MessageContext | None) -> Any:
        if message is None:
            raise refuse_anywhere_else("all_gather(obj)")
        return pack(rref._give(references, message))

    def take(row: Any, message: MessageContext | None) -> RRef[Any]:
        if message is None:
            raise ProtocolError("A reference came in something that is no call.")
        return RRef._of(references.take(unpack(Ref, row), message))

    agent.codec.register(RRef, REFERENCE, give, take)
    agent.codec.register(Method, _METHOD, _give_method, _taking_methods(agent))
    fetch.install(agent, references, lambda handle: fetch_call(RRef._of(handle)))
    creation.install(agent, references)


def _give_method(method: Method, message: MessageContext | None) -> Any:
    return (method.rref, method.name)


def _taking_methods(agent: Agent) -> Callable[[Any, MessageContext | None], Method]:
    def take(pair: Any, message: MessageContext | None) -> Method:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not RRef:
            raise ProtocolError("A method has a reference and a name.")
        rref, name = pair
        place = rref._handle.owner_value
        if type(name) is not str or place is None:
            raise ProtocolError("A method goes to the owner, by its name.")
        # The call starts once the value is there: no thread waits for it meanwhile.
        if message is not None and not place.done():
            message.unsettled = [*message.unsettled, place]
        return Method(rref, name, agent.codec.functions)

    return take


extend("jdist.rpc.rref", install)
