"""`remote`: a value that another worker creates and keeps."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdist.rpc.base.deadline import DEFAULT
from jdist.rpc.base.errors import ProtocolError, RpcTimeout, WorkerLost
from jdist.rpc.base.future import Future, call_when_done, complete, error_of
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.interceptor import Invocation
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.calls import caller as calls
from jdist.rpc.calls.agent import Agent, current_agent
from jdist.rpc.calls.callee import Reply
from jdist.rpc.calls.request import Outgoing
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.rref.owner_value import OwnerValue, again, fail, fill, new_owner_value
from jdist.rpc.rref.references import References
from jdist.rpc.rref.wire import unpack_id

if TYPE_CHECKING:
    from jdist.rpc.rref.reference import RRef

CREATE = "rref.create"

_Name = tuple[GloballyUniqueId, GloballyUniqueId, int]
"""Id of the reference, of the creator's fork, and the low-water mark of requests."""


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT,
) -> "RRef[Any]":
    """Has the worker `to` compute `func(*args, **kwargs)` and keep the result.

    Returns at once, with a reference to the result. It can be used right away: whoever
    needs the value waits until it is there.

    Args:
      to: Name, rank or WorkerInfo; it may be this worker itself.
      func: A function, a class, or a method of an importable class.
      args: Positional arguments, in a tuple or a list.
      kwargs: Keyword arguments, by their names.
      timeout: Seconds for the function to end; -1 for the default, 0 for no limit.

    Raises:
      TypeError, ValueError, ForbiddenFunction: The call itself is wrong.
      RpcError: There is no such worker, or RPC has not been initialized.

    What else goes wrong is raised where the reference is used: the exception of the
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
    outgoing = calls.outgoing(agent, to, CREATE, func, args, kwargs, timeout, "remote")
    if outgoing.peer.info.incarnation == agent.info.incarnation:
        return _on_itself(agent, outgoing)
    references = agent.references
    user_fork, low_water_mark = references.create(incarnation_of(outgoing.peer.info))
    name = (user_fork.rref.packed(), user_fork.fork.packed(), low_water_mark)
    creation: Future[None] = new_owner_value()

    def ended(error: BaseException | None) -> None:
        if error is None:
            references.created(user_fork)
        callbacks = complete(creation, None, error)
        if error is not None:
            references.not_created(user_fork, f"{type(error).__name__}: {error}")
        for callback in callbacks or ():
            agent.pool.run(callback)

    try:
        body = (name, *outgoing.body)
        agent.request(outgoing._replace(body=body, ended=ended))
    except BaseException:
        references.not_asked(user_fork)
        raise
    return references.handle(
        user_fork.rref, user_fork=user_fork, creation=creation, until=outgoing.deadline
    )


def _on_itself(agent: Agent, outgoing: Outgoing) -> "RRef[Any]":
    references, table = agent.references, agent.codec.functions
    rref, owner_value = references.name(), new_owner_value()
    references.create_here(rref, owner_value)
    name = (rref.packed(), rref.packed(), 0)
    try:
        asked = agent.request(outgoing._replace(body=(name, *outgoing.body)))
    except BaseException:
        references.created_here(rref)
        raise
    creation: Future[None] = new_owner_value()

    def over() -> None:
        error = error_of(asked)
        if error is None:
            creation.set_result(None)
        else:
            creation.set_exception(error)
            fail(owner_value, failure_of(error, table), "", table)
        references.created_here(rref)

    call_when_done(asked, over)
    return references.handle(rref, owner_value=owner_value, creation=creation)


def install(agent: Agent, references: References) -> None:
    """Lets others have `agent` create values."""

    def create(caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        name, call = _parts(body)
        owner_value = _place(agent, caller, name)
        try:
            result = calls.execute(agent, caller, call, meta)
        except BaseException as error:  # noqa: BLE001 - it is that of all holders
            fail(owner_value, error, agent.info.name, agent.codec.functions)
            return None
        if isinstance(result, Future):
            return result.then(lambda done: _finish(agent, owner_value, done))
        return _filled(owner_value, result)

    agent.register(CREATE, create, limited=True)


def check(creation: Future[None], table: FunctionTable) -> None:
    """Refuses the use of a reference whose creation failed."""
    error = error_of(creation)
    if error is not None:
        raise failure_of(error, table)


def failure_of(error: BaseException, table: FunctionTable) -> Exception:
    """What somebody gets who uses a reference whose creation failed like this."""
    if isinstance(error, RpcTimeout):
        text = (
            "RRef creation via rpc.remote() timed out, and it is possible that the "
            f"RRef on the owner node does not exist: {error}"
        )
        return RpcTimeout(text)
    if isinstance(error, WorkerLost):
        return WorkerLost(error.worker, "RRef creation", error.reason)
    return again(error, table)


def _place(agent: Agent, caller: WorkerInfo, name: _Name) -> OwnerValue:
    if caller.incarnation == agent.info.incarnation:
        return agent.references.find(name[0])
    if name[0].created_on != caller.incarnation:
        raise ProtocolError("A reference's id bears the number of its creator.")
    return agent.references.on_create(caller, *name)


def _finish(agent: Agent, owner_value: OwnerValue, done: Future[Any]) -> Reply:
    """Takes the result that came later, or why there is none."""
    error = error_of(done)
    if error is None:
        return _filled(owner_value, done.value())
    fail(owner_value, error, agent.info.name, agent.codec.functions)
    return Reply(None, {})


def _filled(owner_value: OwnerValue, result: Any) -> Reply:
    """Puts what the function returned where holders look for it."""
    value, meta = result if type(result) is Reply else (result, {})
    fill(owner_value, value)
    return Reply(None, meta)


def _parts(body: Any) -> tuple[_Name, Invocation]:
    if type(body) is not tuple or len(body) != 4:
        raise ProtocolError("A creation has a name, a function, arguments, keywords.")
    name, *call = body
    if type(name) is not tuple or len(name) != 3:
        raise ProtocolError("A creation's name is two ids and a low_water_mark.")
    rref, fork, low_water_mark = name
    if type(low_water_mark) is not int:
        raise ProtocolError("A creation's low_water_mark is a number.")
    return (unpack_id(rref), unpack_id(fork), low_water_mark), Invocation.unpack(
        CREATE, tuple(call)
    )
