"""Creating a value on another worker: both ends of `remote`."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from jdist.rpc.base.current import Meta
from jdist.rpc.base.errors import ProtocolError, RpcTimeout, WorkerLost
from jdist.rpc.base.future import Future, complete, error_of
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.calls.agent import Agent, Invocation
from jdist.rpc.calls.callee import Reply
from jdist.rpc.calls.function_calls import execute
from jdist.rpc.calls.outstanding_calls import Outgoing, Submitted
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.rref.messages import CreationName, Delete, pack, unpack
from jdist.rpc.rref.owner_value import OwnerValue, again, fail, new_owner_value
from jdist.rpc.rref.protocol import Protocol, UserFork
from jdist.rpc.rref.references import Handle, References

CREATE = "rref.create"


class Creation:
    """The caller's side of one creation.

    `begin`, then `ask`; `give_up` if either raised, also at an interrupt.

    Args:
      references: The caller's.
      outgoing: The request, without the reference's name.
    """

    def __init__(self, references: References, outgoing: Outgoing) -> None:
        self._references = references
        self._outgoing = outgoing
        self._ended: Future[None] = new_owner_value()
        # Noted before they are registered, so that no interrupt loses one.
        self._user_forks: list[UserFork] = []
        self._local: GloballyUniqueId | None = None
        self._place: OwnerValue | None = None
        self._name: CreationName

    def begin(self) -> Handle:
        """Names the value and counts the creator's reference to it."""
        references, outgoing = self._references, self._outgoing
        owner = outgoing.peer.info
        if owner.incarnation == references.agent.info.incarnation:
            # A call to itself: the id stands for the fork, too, and counts as a holder
            # until the function has ended.
            rref = self._local = references.ask(Protocol.name)
            self._name = CreationName(rref, rref, 0)
            place = self._place = new_owner_value()
            references.ask(lambda p: p.create_here(rref, place))
            return Handle(references, rref, owner_value=place, creation=self._ended)
        incarnation = incarnation_of(owner)
        forks = self._user_forks
        fork, low_water_mark = references.ask(lambda p: p.create(incarnation, forks))
        self._name = CreationName(fork.rref, fork.fork, low_water_mark)
        return Handle(
            references, fork.rref, None, fork, self._ended, until=outgoing.deadline
        )

    def ask(self) -> Submitted | None:
        """Sends the request; returns it unless the connection is still being opened."""
        body = (pack(self._name), *self._outgoing.body)
        outgoing = replace(self._outgoing, body=body, ended=self._end)
        return self._references.agent.submit(outgoing).submitted

    def give_up(self, error: BaseException) -> None:
        """Undoes the creation and notifies the owner if it may have been asked."""
        self._end_local()
        for fork in self._user_forks:
            self._give_up(fork, error)

    def _give_up(self, fork: UserFork, error: BaseException) -> None:
        references = self._references
        # An interrupt may come after the request was sent, all else comes before.
        if isinstance(error, Exception):
            references.ask(lambda p: p.not_asked(fork))
            return
        references.do(lambda p: p.not_created(fork, "the call was interrupted"))
        references.drop(fork)

    def _end(self, error: BaseException | None) -> None:
        """Completes the creation; never blocks the thread that reads the answer."""
        references, place = self._references, self._place
        agent, fork = references.agent, next(iter(self._user_forks), None)
        if error is None and fork is not None:
            # Counted first: `confirmed_by_owner` holds once the creation is done.
            references.do(lambda p: p.answered(fork.fork))
        callbacks = complete(self._ended, None, error) or []
        if error is not None and place is not None:
            table = agent.codec.functions
            failure = failure_of(error, table)
            callbacks.append(lambda: fail(place, failure, "", table))
        elif error is not None and fork is not None:
            reason = f"{type(error).__name__}: {error}"
            references.do(lambda p: p.not_created(fork, reason))
        # Callbacks are the user's, and may block.
        for callback in callbacks:
            agent.pool.run(callback)
        self._end_local()

    def _end_local(self) -> None:
        """Ends what `create_here` began; idempotent."""
        rref = self._local
        if rref is not None:
            self._references.do(lambda p: p.on_delete(p.me, Delete(rref, rref)))


def install(agent: Agent, references: References) -> None:
    """Registers the owner's handler of creations."""

    def create(caller: WorkerInfo, body: Any, meta: Meta) -> Any:
        if type(body) is not tuple or not body:
            raise ProtocolError("A creation has a name, and a call.")
        name, call = unpack(CreationName, body[0]), Invocation.unpack(CREATE, body[1:])
        # Before the function runs: a fetch or a fork that comes meanwhile finds it.
        owner_value = _place(references, caller, name)
        return _keep(agent, owner_value, lambda: execute(agent, caller, call, meta))

    agent.register(CREATE, create, limited=True)


def check(creation: Future[None], table: FunctionTable) -> None:
    """Raises the failure of a failed creation."""
    error = error_of(creation)
    if error is not None:
        raise failure_of(error, table)


def failure_of(error: BaseException, table: FunctionTable) -> Exception:
    """Makes the exception for using a reference whose creation has failed."""
    if isinstance(error, RpcTimeout):
        text = (
            "RRef creation via rpc.remote() timed out, and it is possible that the "
            f"RRef on the owner node does not exist: {error}"
        )
        return RpcTimeout(text)
    if isinstance(error, WorkerLost):
        return WorkerLost(error.worker, "RRef creation", error.reason)
    return again(error, table)


def _place(
    references: References, caller: WorkerInfo, name: CreationName
) -> OwnerValue:
    if caller.incarnation == references.agent.info.incarnation:
        return references.find(name.rref)
    # Its numbers deduplicate requests by their creator; a peer must not use another's.
    if name.rref.created_on != caller.incarnation:
        raise ProtocolError("A reference's id bears the number of its creator.")
    return references.on_create(caller, name)


def _keep(agent: Agent, owner_value: OwnerValue, outcome: Callable[[], Any]) -> Any:
    """Stores the outcome of a function, once its future is done if it returned one.

    Returns:
      The reply, or a future of it.
    """
    try:
        result = outcome()
    except BaseException as error:  # noqa: BLE001 - it is that of all holders
        fail(owner_value, error, agent.info.name, agent.codec.functions)
        return Reply(None, {})
    if isinstance(result, Future):
        return result.then(lambda done: _keep(agent, owner_value, done.value))
    reply = result if type(result) is Reply else Reply(result, {})
    owner_value.set_result(reply.value)
    return Reply(None, reply.meta)
