"""Two live processes of torch, and what they print."""

import subprocess
import sys


def outputs_of_both(before, after, env=None):
    """Runs `python *before rank *after` for ranks 0 and 1, side by side.

    Args:
      before: Arguments before the rank: what to run.
      after: Arguments after it.
      env: Variables of both; by default this process's.

    Returns:
      What each printed, and its errors. Both must succeed.
    """
    workers = [
        subprocess.Popen(
            [sys.executable, *before, str(rank), *after],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    return outputs
