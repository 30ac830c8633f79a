"""`spawn`: one function in N fresh processes of this machine.

The processes are started as programs of their own, not by `multiprocessing`: its
children import the main module, and with it usually JAX, before anything can be set up
for them, take their environment from the parent's, outlive a parent that is killed,
and leave a tracker process behind. What is the same: nothing is inherited, functions
and arguments travel as pickles, the main module is imported under the name
`__mp_main__`, so that what stands under `if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from jdist._errors import (
    check_function,
    check_number,
    check_type,
    requirement,
    value_error,
)
from jdist.rpc.base.current import DEFAULT
from jdist.rpc.base.errors import ProcessFailed, RpcError, RpcTimeout
from jdist.rpc.base.posix import require_posix
from jdist.rpc.calls.function_calls import positional
from jdist.rpc.group.rendezvous import (
    Rendezvous,
    ReservedPort,
    new_cluster_key,
)
from jdist.rpc.processes.process_settings import (
    ProcessSettings,
    ResolvedSettings,
    settings_of_each,
)
from jdist.rpc.processes.supervisor import Ending, ProcessCommand, Supervisor

_SPAWNED = Path(__file__).with_name("spawned.py")
_AT = {False: "before its function returned", True: "after its function had returned"}


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 2,
    *,
    settings: ProcessSettings | None = ProcessSettings(),  # noqa: B008 - frozen
    pin: int = 0,
    timeout: float = 0,
    grace: float = 5.0,
    join: bool = True,
) -> Any:
    """Calls `fn(rank, *args)` in `nprocs` fresh processes and returns their results.

    Each process finds `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`
    and a fresh `JDIST_CLUSTER_KEY` in its environment, which is all that
    `rpc.init_rpc(f"worker{rank}")` needs, and JAX's coordinator address for
    `jax.distributed.initialize` (docs/launch.md lists all variables). Its standard
    input is empty; its output goes where this process's goes.

    The first process that fails ends the others: SIGTERM, and SIGKILL after the grace
    period. So does any exception here, such as Ctrl-C. If this process is killed, they
    are killed at once. What they started themselves ends with them.

    Args:
      fn: A function that pickle can name: defined at the top level of a module, or of
        the program itself if that guards its start by `if __name__ == "__main__":`.
      args: Its arguments after the rank, in a tuple or a list; picklable.
      nprocs: How many processes.
      settings: Settings in force before JAX is imported; None for none.
      pin: How many cores each process gets for itself (True is 1); 0 for no pinning.
      timeout: Seconds that the whole may take; 0 for no limit.
      grace: Seconds between SIGTERM and SIGKILL.
      join: False returns at once, with the `Processes` to wait for.

    Returns:
      What `fn` returned, by rank; it must be picklable. With `join=False`, the
      processes.

    Raises:
      ProcessFailed: A process raised, or ended without a result; the first one, with
        its rank and its traceback.
      RpcTimeout: The timeout passed. All processes were ended.
      ValueError: An argument is out of range, or pickle cannot name or carry it.
      TypeError: `fn` cannot be called; `args` is neither a tuple nor a list, as in
        `args=(x)`.
      RuntimeError: Called while the main module of a spawned process is imported.
      Unavailable: Not a POSIX system.

    Source: `torch.multiprocessing.spawn`.

    Example:
      >>> import math
      >>> spawn(math.pow, args=(2,), nprocs=3)
      [0.0, 1.0, 4.0]
    """
    require_posix("spawn")
    # A rank fills 16 bits of every id.
    in_range: Callable[[int], bool] = range(1, 2**16 + 1).__contains__
    check_number(
        "spawn(nprocs=...)", nprocs, "must be in 1..65536", in_range, whole=True
    )
    for name, seconds in (("timeout", timeout), ("grace", grace)):
        rule = "must be seconds, finite and at least 0"
        check_number(f"spawn({name}=...)", seconds, rule, lambda s: 0 <= s < math.inf)
    if settings is not None:
        rule = "must be an rpc.ProcessSettings, or None"
        check_type("spawn(settings=...)", settings, ProcessSettings, rule)
    chosen = settings_of_each("spawn(pin=...)", settings, nprocs, pin)
    processes = Processes(_request(fn, args), chosen, timeout, grace)
    if not join:
        return processes
    try:
        return processes.join()
    except KeyboardInterrupt as interruption:
        # Its traceback ends here: where this library waited is of no interest.
        raise interruption.with_traceback(None) from None


class Processes:
    """The processes of one `spawn(join=False)`.

    As a context manager it ends those that still run. Without `join` and `close` they
    end with this process.

    Attributes:
      pids: Their process ids, by rank.
      coordinator: Where they meet, for `init_rpc(coordinator=...)` in this process:
        it may join their group, with a rank that none of them has.
      key: Their cluster's key, for `RpcOptions(key=...)` likewise.
    """

    def __init__(
        self,
        request: bytes,
        settings: Sequence[ResolvedSettings],
        timeout: float,
        grace: float,
    ) -> None:
        self._timeout = timeout
        self._results: list[Any] | None = None
        self._failure: RpcError | None = None
        with ExitStack() as stack:
            # Files and not pipes: a result of any size can be written before it is
            # read, and outlives its process.
            self._outcomes = [stack.enter_context(TemporaryFile()) for _ in settings]
            # The ports are reserved until all is over: no other program is given them
            # before the workers listen, nor between two groups.
            meeting = Rendezvous(
                nprocs=len(settings),
                port=stack.enter_context(ReservedPort()).port,
                jax_port=stack.enter_context(ReservedPort()).port,
                key=new_cluster_key(),
            )
            self._supervisor = stack.enter_context(Supervisor(grace))
            # One file for all: the children map it, and it may be large.
            with TemporaryFile() as file:
                file.write(request)
                file.flush()
                for rank in range(len(settings)):
                    self._start(rank, file.fileno(), meeting, settings[rank])
            self._resources = stack.pop_all()
        self.pids = tuple(child.pid for child in self._supervisor.children)
        self.coordinator = (meeting.address, meeting.port)
        self.key = meeting.key

    @property
    def running(self) -> bool:
        """Whether all of them still run; `join` returns or raises the outcome."""
        return not any(child.ending for child in self._supervisor.children)

    def _start(
        self, rank: int, request: int, meeting: Rendezvous, settings: ResolvedSettings
    ) -> None:
        descriptors = (request, self._outcomes[rank].fileno())
        arguments = [str(number) for number in (rank, *descriptors)]
        program = ProcessCommand(
            name=f"rank {rank}",
            command=[str(_SPAWNED), *arguments],
            environment={**os.environ, **meeting.variables(rank)},
            settings=settings,
            descriptors=descriptors,
        )
        self._supervisor.start(program)

    def join(self, timeout: float = DEFAULT) -> list[Any]:
        """Waits for all of them; later calls return or raise the same at once.

        Args:
          timeout: Seconds to wait; -1 for what `spawn` was given, 0 for no limit.

        Returns:
          What the function returned, by rank.

        Raises:
          ProcessFailed: As `spawn`.
          RpcTimeout: As `spawn`.
          RpcError: They were ended by `close`.
        """
        timeout = self._timeout if timeout == DEFAULT else timeout
        with self:
            if self._results is None and self._failure is None:
                self._await(timeout)
        if self._failure:
            raise self._failure
        return list(self._results or ())

    def close(self) -> None:
        """Ends those that still run, waits for them, and releases everything."""
        if self._results is None and self._failure is None:
            self._failure = RpcError("The processes were ended before they had results")
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _await(self, timeout: float) -> None:
        if not self._supervisor.wait(timeout or None):
            self._failure = self._timed_out(timeout)
            return
        outcomes = [self._outcome(rank) for rank in range(len(self.pids))]
        self._failure = self._first_failure(outcomes)
        if self._failure is None:
            self._results = [outcome["value"] for outcome in outcomes]

    def _timed_out(self, timeout: float) -> RpcTimeout:
        children = enumerate(self._supervisor.children)
        ranks = ", ".join(str(rank) for rank, child in children if not child.ending)
        return RpcTimeout(
            f"spawn ran for more than set timeout of {timeout} s: rank {ranks} had not "
            "ended. All processes were ended."
        )

    def _first_failure(self, outcomes: list[dict[str, Any]]) -> ProcessFailed | None:
        """The failure with the earliest moment, if any process failed."""
        # By moment, not by arrival: its peers' failures, which follow from it, may have
        # been noticed before it.
        found = []
        for rank, child in enumerate(self._supervisor.children):
            outcome, ending = outcomes[rank], child.ending or Ending(0)
            if "error" in outcome:
                what, moment = "failed", outcome["moment"]
            elif child is self._supervisor.failure or not (outcome or ending.failed):
                what, moment = f"{ending} {_AT[bool(outcome)]}", ending.moment
            else:
                continue
            trace = outcome.get("error", "")
            found.append((moment, ProcessFailed(rank, child.pid, what, trace)))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _outcome(self, rank: int) -> dict[str, Any]:
        """Reads a process's outcome file; empty if it ended before it wrote one."""
        file = self._outcomes[rank]
        file.seek(0)
        try:
            return pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            return {}
        except Exception as error:
            error.add_note(f"While reading what rank {rank} returned.")
            raise


def _request(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle the call and the data by which a process finds the function."""
    check_function("spawn(fn=...)", fn)
    main = main_module()
    if getattr(fn, "__module__", "") == "__main__" and not main:
        rule = "must be defined in a module or a program, not in an interactive session"
        raise value_error("spawn(fn=...)", rule, fn)
    rule, remedy = "must be a function that pickle can name", "Define it in a module."
    _pickled(fn, requirement("spawn(fn=...)", rule, fn, remedy))
    rule = "must be values that pickle can carry"
    given = positional("spawn", args)
    # Pickled by itself: it can be read only once the main module has been imported.
    call = _pickled((fn, given), requirement("spawn(args=...)", rule, given))
    # An empty entry stands for the current folder, which may be another one there.
    path = [folder or os.getcwd() for folder in sys.path]
    # The keys are those of `multiprocessing.spawn.prepare`.
    return pickle.dumps(({"sys_path": path, "sys_argv": sys.argv, **main}, call))


def main_module() -> dict[str, str]:
    """Describe how to import the main module again; empty in an interactive session."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None) or ""
    if getattr(main, "preparing", False) and file == str(_SPAWNED):
        raise RuntimeError(
            "`spawn` was called while a spawned process imported the main module. "
            'Guard the start of the program by `if __name__ == "__main__":`.'
        )
    if name := getattr(getattr(main, "__spec__", None), "name", None):
        return {"init_main_from_name": name}
    return (
        {"init_main_from_path": os.path.abspath(file)} if Path(file).is_file() else {}
    )


def _pickled(value: object, refusal: str) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{refusal} Pickle says: {error}.") from error
