"""Requests to all owners of parameters at once, and the errors of all that failed."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jdist.rpc import Future, WorkerInfo
from jdist.rpc.extension import NEEDS, Agent, current_agent

# An owner may be asked before it has imported autograd for its first variable.
_META = {NEEDS: "jdist.autograd.optimizer.owner_side:install"}


def ask_all(
    kind: str, bodies: Mapping[WorkerInfo, Any], timeout: float, complaint: str
) -> dict[WorkerInfo, Any]:
    """Sends each worker a request, and waits for all answers.

    Args:
      kind: Kind of the requests.
      bodies: The body of each worker's request.
      timeout: Seconds for each; -1 for the default, 0 for no limit.
      complaint: Begins the text of the error if any of them fails.

    Raises:
      ExceptionGroup: Some failed. It holds the errors of all of these, and its message
        names them.
    """
    agent = current_agent()
    *others, (last, last_body) = bodies.items()
    asked = {
        worker: _begun(agent, worker, kind, body, timeout) for worker, body in others
    }
    # One owner is asked on this thread itself, which saves a hand-off.
    waits: dict[WorkerInfo, Callable[[], Any]] = {
        last: lambda: agent.call(last, kind, last_body, timeout, _META),
        **{worker: future.wait for worker, future in asked.items()},
    }
    answers: dict[WorkerInfo, Any] = {}
    errors: dict[WorkerInfo, Exception] = {}
    for worker, wait in waits.items():
        try:
            answers[worker] = wait()
        except Exception as error:  # noqa: BLE001 - raised below, all together
            errors[worker] = error
    if errors:
        raise _all_of(errors, answers, complaint)
    return answers


def _begun(
    agent: Agent, worker: WorkerInfo, kind: str, body: object, timeout: float
) -> Future[Any]:
    try:
        return agent.call_async(worker, kind, body, timeout, _META)
    except Exception as error:  # noqa: BLE001 - it is that owner's, as if it came later
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _all_of(
    errors: Mapping[WorkerInfo, Exception],
    answers: Iterable[WorkerInfo],
    complaint: str,
) -> ExceptionGroup[Exception]:
    # Not in the order of arrival: the message is the same in every run.
    by_rank = sorted(errors, key=lambda worker: worker.id)
    told = "; ".join(
        f"{worker.name!r}: {type(errors[worker]).__name__}: {errors[worker]}"
        for worker in by_rank
    )
    done = ", ".join(repr(w.name) for w in sorted(answers, key=lambda w: w.id))
    rest = f" Done on {done}." if done else ""
    text = f"{complaint} It failed on {told}.{rest}"
    return ExceptionGroup(text, [errors[worker] for worker in by_rank])
