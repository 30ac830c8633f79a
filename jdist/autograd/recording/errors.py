"""Exceptions of distributed autograd."""

from jdist._errors import JdistError, requirement


class AutogradError(JdistError, RuntimeError):
    """Base class; a `RuntimeError` too, because torch raises that."""


class ContextNotFound(AutogradError):
    """There is no such context on this worker: never made here, or released."""


class GraphFreed(AutogradError, ValueError):
    """A backward pass needs residuals that an earlier one has released."""


class BackwardError(AutogradError):
    """A backward pass failed; `__cause__` is what was raised, of its own type.

    It is raised on the worker that called `backward`, whichever worker failed. The
    text begins as torch's does, with the name in place of the node's number.

    Attributes:
      worker: Name of the worker on which it failed.
      reason: The exception that was raised there, in words.

    Example:
      >>> print(BackwardError("worker1", "matrix is singular"))
      Error on worker worker1: matrix is singular
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return f"Error on worker {self.worker}: {self.reason}"


class UnusedSend(BackwardError):
    """FAST mode waited for a gradient that no worker will send.

    `mode="smart"` does not wait for it; torch waits for ever here.
    """


def refused(call: str, rule: str, got: object, remedy: str = "") -> AutogradError:
    """An `AutogradError` whose message is `requirement` of the arguments."""
    return AutogradError(requirement(call, rule, got, remedy))


def no_context(context_id: object, why: str = "") -> ContextNotFound:
    """Make the error for a missing context, in torch's words."""
    message = f"Could not find autograd context with id: {context_id}."
    return ContextNotFound(f"{message} {why}" if why else message)
