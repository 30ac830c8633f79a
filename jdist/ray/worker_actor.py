"""The Ray actor in which a worker runs."""

import os
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.spawn import prepare
from pathlib import Path

from jdist import rpc

_preparing = threading.Event()


def is_preparing() -> bool:
    """Whether this process is an actor that imports the driver's main module."""
    return _preparing.is_set()


class WorkerActor:
    """A process that Ray placed; rpc, not Ray, serves its calls.

    Args:
      variables: Environment variables to set.
      main: How the driver's main module is imported here, see
        `jdist.rpc.extension.main_module`.
    """

    def __init__(self, variables: Mapping[str, str], main: Mapping[str, str]) -> None:
        os.environ.update(variables)
        # A program on the driver's machine only cannot be imported: calls of its
        # functions are then refused by name.
        if Path(main.get("init_main_from_path", __file__)).is_file():
            # A main module without a guard calls `cluster` here, which then refuses.
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
        """Joins the group; environment variables hold the rank and the address."""
        rpc.init_rpc(name, world_size=world_size, allow=allow, options=options)

    def leave(self, graceful: bool) -> None:
        """Shuts the worker down; the process stays."""
        rpc.shutdown(graceful)

    def watch(self) -> None:
        """Never returns: Ray answers with an error as soon as the process has ended."""
        threading.Event().wait()
