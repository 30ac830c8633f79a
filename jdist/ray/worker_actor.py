"""The Ray actor that is one worker."""

import os
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.spawn import prepare
from pathlib import Path

from jdist import rpc

__all__ = ["WorkerActor", "is_preparing"]

_preparing = threading.Event()


def is_preparing() -> bool:
    """Whether this process is an actor that imports the driver's main module."""
    return _preparing.is_set()


class WorkerActor:
    """A process that Ray placed; its calls are served by rpc, and not by Ray.

    Args:
      variables: Environment variables to set.
      main: How the driver's main module is imported again, see
        `jdist.rpc.extension.main_module`.
    """

    def __init__(self, variables: Mapping[str, str], main: Mapping[str, str]) -> None:
        os.environ.update(variables)
        # A program that lies on the driver's machine alone cannot be imported. Its
        # functions are then refused when they are called, by name.
        if Path(main.get("init_main_from_path", __file__)).is_file():
            _preparing.set()
            try:
                prepare(dict(main))
            finally:
                _preparing.clear()

    def ready(self) -> None:
        """Returns once the actor has been placed and constructed."""

    def join(
        self, name: str, world_size: int, allow: Sequence[str], options: rpc.RpcOptions
    ) -> None:
        """Becomes a worker of the group; its rank and the address are variables."""
        rpc.init_rpc(name, world_size=world_size, allow=allow, options=options)

    def leave(self, graceful: bool) -> None:
        """Ends the worker; the process stays."""
        rpc.shutdown(graceful)

    def watch(self) -> None:
        """Never returns: Ray answers with an error as soon as the process has ended."""
        threading.Event().wait()
