"""`python -m jdist.launch --nproc N script.py ...`: see docs/launch.md."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from rich.console import Console
from rich.markup import escape

from jdist._errors import JdistError, value_error
from jdist.launch.options import cluster_key, parse
from jdist.launch.relay import Relay
from jdist.rpc.extension import (
    ProcessCommand,
    Rendezvous,
    ReservedPort,
    Supervisor,
    require_posix,
)

# Not wrapped: a path broken over two lines could be neither searched nor copied.
error_console = Console(stderr=True, soft_wrap=True, highlight=False)


class Interrupted(BaseException):
    """Raised by a signal that asks this program to end.

    Not an error, and therefore a `BaseException` like `KeyboardInterrupt`.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    try:
        require_posix("python -m jdist.launch")
        with ExitStack() as stack:
            key = cluster_key(options.key_file, options.nnodes)
            meeting = _meet(options, key, stack)
            relay = stack.enter_context(Relay(options.log_dir))
            return _run(options, meeting, relay)
    except (JdistError, ValueError, OSError) as error:
        # Escaped: rich would take brackets in a message for markup.
        error_console.print("[red]error:[/red]", escape(str(error)))
        # The status that argparse gives to misuse.
        return 2


def _meet(options: argparse.Namespace, key: str, stack: ExitStack) -> Rendezvous:
    """The rendezvous of the workers; reserves the ports of a single machine."""
    port, jax_port = options.master_port, options.jax_port
    # Across machines no port can be reserved: the others must know the ports before
    # machine 0 is reached.
    if options.nnodes == 1:
        port = _reserved("--master-port", port, stack)
        jax_port = _reserved("--jax-port", jax_port, stack)
    return Rendezvous(
        nprocs=options.nproc,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        address=options.master_addr or "127.0.0.1",
        port=port,
        jax_port=jax_port,
        key=key,
    )


def _reserved(option: str, port: int | None, stack: ExitStack) -> int:
    """Reserves a port, a free one for None."""
    try:
        return stack.enter_context(ReservedPort(port or 0)).port
    except OSError as error:
        rule, got = "must be a port that is free here", f"{port}: {error.strerror}"
        remedy = "Without --master-port and --jax-port free ones are chosen."
        raise value_error(option, rule, got, remedy) from error


def _run(options: argparse.Namespace, meeting: Rendezvous, relay: Relay) -> int:
    try:
        with _interrupts():
            restart = 0
            supervisor = _attempt(options, meeting, relay, restart)
            # All workers restart, as with torchrun: `jax.distributed` does not let a
            # new process take the place of a lost rank.
            while supervisor.failure and restart < options.max_restarts:
                restart += 1
                count = f"restart {restart} of {options.max_restarts}"
                _tell(supervisor, relay, f" All are started again, {count}.")
                supervisor = _attempt(options, meeting, relay, restart)
    except Interrupted as interruption:
        _finish(relay)
        name = signal.Signals(interruption.number).name
        error_console.print(f"[red]{name}:[/red] all workers were ended.")
        # The status that a shell returns for a program ended by a signal.
        return 128 + interruption.number
    return _report(supervisor, relay)


def _attempt(
    options: argparse.Namespace, meeting: Rendezvous, relay: Relay, restart: int
) -> Supervisor:
    """Starts all workers and waits until they end; returns their supervisor."""
    with Supervisor(options.grace) as supervisor:
        try:
            _start(options, meeting, relay, supervisor, restart)
            supervisor.wait()
        except Interrupted as interruption:
            # The same signal, so that a worker's own handlers for it run.
            supervisor.stop(interruption.number)
            raise
    _finish(relay)
    return supervisor


def _start(
    options: argparse.Namespace,
    meeting: Rendezvous,
    relay: Relay,
    supervisor: Supervisor,
    restart: int,
) -> None:
    for local_rank, settings in enumerate(options.settings):
        program = ProcessCommand(
            name=f"worker{meeting.rank(local_rank)}",
            command=options.command,
            # Unbuffered, so that output is not lost with a worker, unless the user
            # chose otherwise. The run's variables override inherited ones, since a
            # launcher may itself be a worker of another.
            environment={
                "PYTHONUNBUFFERED": "1",
                **os.environ,
                **meeting.variables(local_rank),
                "JDIST_RESTART_COUNT": str(restart),
                "JDIST_MAX_RESTARTS": str(options.max_restarts),
            },
            settings=settings,
            python=not options.no_python,
            captured=True,
        )
        # None if an earlier worker has failed while these were being started.
        if child := supervisor.start(program):
            relay.follow(child.name, child.output, child.errors, restart)


def _finish(relay: Relay) -> None:
    relay.drain()
    for complaint in relay.complaints():
        error_console.print("[yellow]incomplete:[/yellow]", escape(complaint))


def _report(supervisor: Supervisor, relay: Relay) -> int:
    failure = supervisor.failure
    if failure is None or failure.ending is None:
        return 0
    _tell(supervisor, relay)
    relay.repeat_last_words(failure.name)
    return failure.ending.status


def _tell(supervisor: Supervisor, relay: Relay, then: str = "") -> None:
    """Prints which worker failed and what follows."""
    failure = supervisor.failure
    assert failure is not None
    others = "; the others were ended" if len(supervisor.children) > 1 else ""
    log = relay.log_of(failure.name)
    error_console.print(
        f"[red]{failure.name}[/red] (pid {failure.pid}) {failure.ending}{others}."
        f"{then}{' Its log: ' + escape(log) if log else ''}"
    )


@contextmanager
def _interrupts() -> Iterator[None]:
    """Makes signals that end a program raise `Interrupted` within the block.

    An ignored signal, as under nohup, stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [n for n in wanted if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    # If the parent process ignores SIGCHLD, exit statuses of workers would be lost.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
