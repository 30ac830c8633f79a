"""`RRef.backward`: a pass that begins on the owner of the value."""

from typing import Any

from jdist._errors import requirement
from jdist.autograd.contexts.context import Container, here, recorded_into
from jdist.autograd.engine.backward import backward, backward_of
from jdist.autograd.engine.failure import PassFailure
from jdist.autograd.engine.local_pass import LocalPass
from jdist.autograd.recording.errors import AutogradError
from jdist.rpc import Future, ProtocolError, RRef, WorkerInfo
from jdist.rpc.extension import BACKWARD, call_when_done, cancel, current, error_of

REFERENCE = "autograd.reference"


def install(container: Container) -> None:
    """Lets references to values of this worker be differentiated, and from here."""
    agent = container.agent

    def answer(
        caller: WorkerInfo, body: object, meta: dict[str, object]
    ) -> Future[None]:
        if type(body) is not tuple or [type(part) for part in body] != [
            RRef, int, bool
        ]:  # fmt: skip
            raise ProtocolError("A reference, a context and a mode are needed.")
        rref, context_id, retain_graph = body
        # Taken in the call: the pass begins later, on another thread.
        limit = current.deadline()

        def begin(computed: Future[type]) -> LocalPass:
            computed.value()
            context = container.retrieve(context_id)
            return backward_of(context, rref.local_value(), retain_graph, limit)

        # A value that is not computed yet is waited for without a thread.
        begun = rref.value_type(blocking=False).then(begin)
        outcome: Future[None] = Future()
        call_when_done(begun, lambda: _follow(begun, outcome, agent.info.name))
        return outcome

    agent.register(REFERENCE, answer)
    agent.extension_state[BACKWARD] = run


def run(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """See `RRef.backward`.

    Raises:
      AutogradError: No context was given, and there is none here.
      Exception: As `jdist.autograd.backward`.
    """
    container = here()
    if context_id == -1:
        context = recorded_into(container)
        if context is None:
            rule = "must be the id of a context, outside of one"
            remedy = "Gradients are kept in contexts, and never with a variable."
            raise AutogradError(
                requirement("RRef.backward(context_id)", rule, context_id, remedy)
            )
        context_id = context.id
    if rref.is_owner():
        backward(context_id, [rref.local_value()], retain_graph=retain_graph)
    else:
        body = (rref, context_id, bool(retain_graph))
        container.agent.call(rref.owner(), REFERENCE, body)


def _follow(begun: Future[LocalPass], outcome: Future[None], worker: str) -> None:
    """Completes `outcome` at the end of the pass; to cancel it ends the pass."""
    failed = error_of(begun)
    if failed is not None:
        cancel(outcome, failed)
        return
    local_pass = begun.value()

    def over() -> None:
        error = error_of(local_pass.done)
        if error is not None:
            cancel(outcome, error)
        elif not outcome.done():
            outcome.set_result(None)

    def given_up() -> None:
        error = error_of(outcome)
        if isinstance(error, Exception) and not local_pass.done.done():
            # The caller has given up, and its deadline is that of the pass.
            local_pass.fail(PassFailure(worker, error))

    call_when_done(local_pass.done, over)
    call_when_done(outcome, given_up)
