"""The first program of every process that jdist starts; it then runs the user's.

Run as a file, `python -I -S trampoline.py SETTINGS COMMAND...`, with nothing but the
standard library: JAX must not be loaded before the settings are in force. What is set
here belongs to the process, not to the interpreter, so it outlives the `exec` at the
end, and the program runs exactly as if it had been started by hand.

The lifeline is the read end of a pipe whose other end only the parent has. When the
parent is gone, however it died, the kernel closes that end and ends the whole process
group of this process: its children too, even if it is stuck with the interpreter's
lock held. (Linux's `PR_SET_PDEATHSIG` fires when the *thread* that started the process
ends, and spares grandchildren.)
"""

import contextlib
import json
import os
import select
import signal
import sys

with contextlib.suppress(ImportError):  # Nothing runs this on Windows.
    import fcntl


def main() -> None:
    """Applies the settings of the first argument and runs the command of the others."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    hold_lifeline(settings["lifeline"])
    # It belongs to this process's parent, if that was started too.
    os.environ.pop("JDIST_BATCH_CLASS", None)
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    if settings["batch"]:
        schedule_in_batches()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # A shell's exit code for a missing program.
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
        sys.exit(127)


def schedule_in_batches() -> None:
    """Enters the class SCHED_BATCH, from the ordinary one only, and notes that it has.

    Where there is no such class, or it may not be entered, the process begins without.
    """
    # A process that was put into a real-time or idle class is there on purpose.
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) not in (
        os.SCHED_OTHER,
        os.SCHED_BATCH,
    ):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.environ["JDIST_BATCH_CLASS"] = "1"


def hold_lifeline(descriptor: int) -> None:
    """Ties the life of this process group to the other end of a pipe."""
    if hasattr(fcntl, "F_SETSIG"):
        end_group_by_signal(descriptor)
    else:
        end_group_by_guardian(descriptor)


def end_group_by_signal(descriptor: int) -> None:
    """Linux: the kernel sends SIGKILL to the group when the pipe closes."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    # It may have closed before the kernel was told.
    if select.select([descriptor], [], [], 0)[0]:
        os.killpg(0, signal.SIGKILL)


def end_group_by_guardian(descriptor: int) -> None:
    """Elsewhere: a small process in the group waits for the pipe to close."""
    # Forked twice, so that the program does not find a child that is not its own.
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    elif os.fork():
        os._exit(0)
    else:
        os.read(descriptor, 1)
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
