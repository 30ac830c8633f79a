"""The program of a process that `jdist.rpc.spawn` started: one call.

Run as a file, `python spawned.py RANK REQUEST OUTCOME`, and with the standard library
alone: where jdist is to be imported from is part of the request. Request and outcome
are files without a name, so neither side ever waits for the other to read.
"""

import mmap
import os
import pickle
import sys
import time
import traceback
from multiprocessing.spawn import prepare
from typing import Any

preparing = False
"""Whether the main module is being imported, which must not spawn in turn."""


def main() -> int:
    """Make the call and return the exit status, 1 if it raised."""
    rank, request, outcome = map(int, sys.argv[1:])
    # The program's own children must not inherit them.
    for descriptor in (request, outcome):
        os.set_inheritable(descriptor, False)
    failed = False
    try:
        text = carried({"value": call(rank, request)})
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the parent raises it again
        failed = True
        text = pickle.dumps({"moment": time.monotonic(), "error": describe(error)})
    with open(outcome, "wb") as file:
        file.write(text)
    return int(failed)


def call(rank: int, request: int) -> Any:
    """Import the parent's main module and call the function."""
    global preparing
    with mmap.mmap(request, 0, access=mmap.ACCESS_READ) as memory:
        surroundings, call = pickle.loads(memory)
    preparing = True
    # Sets the module search path, then imports the main module as `__mp_main__`.
    prepare(surroundings)
    preparing = False
    fn, args = pickle.loads(call)
    return fn(rank, *args)


def carried(answer: dict[str, Any]) -> bytes:
    """Pickle the answer; a result that pickle refuses is the caller's mistake."""
    try:
        return pickle.dumps(answer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        rule = "must return what pickle can carry"
        got = repr(answer["value"])
        raise TypeError(f"`spawn(fn=...)` {rule}. Got {got}.") from error


def describe(error: BaseException) -> str:
    """Format the traceback, from the first frame outside of this file."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames)))


if __name__ == "__main__":
    sys.exit(main())
