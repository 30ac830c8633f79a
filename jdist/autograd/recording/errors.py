"""What can go wrong in distributed autograd, as exceptions."""

from jdist._errors import JdistError


class AutogradError(JdistError, RuntimeError):
    """Base class; a `RuntimeError` too, because torch raises that."""


class ContextNotFound(AutogradError):
    """There is no such context on this worker: never made here, or released."""


class GraphFreed(AutogradError, ValueError):
    """A backward pass needs residuals that an earlier one has let go."""


def no_context(context_id: object, why: str = "") -> ContextNotFound:
    """The error for a context that is not there, in the words torch's users know."""
    message = f"Could not find autograd context with id: {context_id}."
    return ContextNotFound(f"{message} {why}" if why else message)
