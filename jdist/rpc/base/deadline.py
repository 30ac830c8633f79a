"""Deadlines: absolute inside, timeouts outside, remaining seconds on the wire.

A deadline is a moment of `time.monotonic()`; None means no limit. It is *firm* when a
timeout was given, and soft when it only follows from the default timeout, which is
there so that nothing hangs.
"""

import math
import time
from typing import Any, NamedTuple

from jdist._errors import requirement
from jdist.rpc.base.options import DEFAULT_TIMEOUT

__all__ = [
    "DEFAULT", "LONGEST", "NEVER", "Deadline", "check_timeout", "exceeded",
    "from_meta", "moment", "resolve", "to_meta",
]  # fmt: skip


DEFAULT = -1.0
"""The timeout that stands for the worker's default."""


class Deadline(NamedTuple):
    """When to give up, and whether a timeout was given.

    Attributes:
      at: Moment of `time.monotonic()`, or None.
      timeout: The seconds that were allowed, for messages.
      firm: Whether a timeout was given.
    """

    at: float | None = None
    timeout: float = 0.0
    firm: bool = False

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None without a limit."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())


NEVER = Deadline()

LONGEST = 1e6
"""Seconds. Longer timeouts count as no limit: poll(2) counts milliseconds in 31 bits,
and a lock refuses to wait for more than some centuries."""


def moment(seconds: float) -> float | None:
    """When that many seconds are over; None for 0, and beyond LONGEST."""
    return time.monotonic() + seconds if 0 < seconds <= LONGEST else None


def resolve(timeout: float, default: float, enclosing: Deadline) -> Deadline:
    """The deadline of a call: its own timeout, but never beyond the enclosing call.

    Args:
      timeout: Seconds; -1 for the default, 0 for no limit.
      default: The worker's default in seconds, 0 for no limit.
      enclosing: Deadline of the call within which this one is made.

    Raises:
      TypeError: `timeout` is not a number.
      ValueError: `timeout` is negative and not -1, or not finite.
    """
    if timeout == DEFAULT:
        # A default that was set by the user is as firm as a timeout of the call.
        seconds, firm = default, default not in (DEFAULT_TIMEOUT, 0)
    else:
        check_timeout("timeout", timeout)
        seconds, firm = timeout, timeout > 0
    at = moment(seconds)
    if enclosing.at is not None and (at is None or enclosing.at < at):
        return enclosing
    return Deadline(at, seconds, firm)


def check_timeout(call: str, timeout: object) -> None:
    """Refuses what is neither -1 nor a finite, non-negative number of seconds."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(requirement(call, "must be a number of seconds", timeout))
    if timeout != DEFAULT and not 0 <= timeout < math.inf:
        rule = "must be finite and RPC Timeout must be non-negative"
        remedy = "0 means no limit and -1 the default."
        raise ValueError(requirement(call, rule, timeout, remedy))


def to_meta(deadline: Deadline) -> dict[str, Any]:
    """Metadata of a request: seconds left, because clocks of two machines differ."""
    if deadline.at is None:
        return {}
    meta: dict[str, Any] = {"deadline": deadline.at - time.monotonic()}
    if deadline.firm:
        meta["firm"] = True
    return meta


def from_meta(meta: dict[str, Any]) -> Deadline:
    """The inverse of `to_meta`; what is not a number counts as no deadline."""
    seconds = meta.get("deadline")
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return NEVER
    # A peer may send any number; a lock refuses to wait for some.
    at = time.monotonic() + min(seconds, LONGEST)
    return Deadline(at, seconds, meta.get("firm") is True)


def exceeded(deadline: Deadline) -> str:
    """The beginning of every message of a timeout, in torch's words."""
    milliseconds = round(deadline.timeout * 1000)
    return f"RPC ran for more than set timeout ({milliseconds} ms)"
