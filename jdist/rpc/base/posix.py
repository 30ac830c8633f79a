"""What differs between POSIX and other systems: refusals in words, and forks."""

import os
import sys
from collections.abc import Callable

from jdist._errors import Unavailable


def require_posix(call: str) -> None:
    """Raises where there are no process groups, signals and inherited descriptors.

    Args:
      call: What needs them, for the error's text.

    Raises:
      Unavailable: This is Windows, or another system that is not POSIX.
    """
    if os.name != "posix":
        raise Unavailable(
            f"`{call}` needs Linux, macOS or another POSIX system. Got {sys.platform}. "
            "On Windows run it under WSL; workers in the threads of one process, "
            "`rpc.local_cluster`, need neither."
        )


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Registers a function for forked children; there are none on Windows."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
