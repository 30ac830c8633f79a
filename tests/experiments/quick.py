"""Running an experiment as a user does: a fresh process, a plain environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_quick(folder, *names):
    """Runs `python -m experiments NAME .. --quick` in a process of its own."""
    plain = {
        name: value
        for name, value in os.environ.items()
        # Compiled programs stay with the suite's.
        if not name.startswith("JAX_") or "_CACHE_" in name or "_COMPILATION_" in name
    }
    return subprocess.run(
        [sys.executable, "-m", "experiments", *names, "--quick", "--out", str(folder)],
        capture_output=True, text=True, timeout=280, cwd=ROOT, env=plain,
    )  # fmt: skip


def check_held(done, folder, name):
    """The run says of this experiment that it holds, in a line made of its claims."""
    path = folder / f"{name}.json"
    assert path.exists(), done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record["holds"], done.stdout + done.stderr
    assert all(claim["verdict"] != "does not hold" for claim in record["claims"])
    assert any(
        line.startswith("Proved ") and record["outcome"] in line
        for line in done.stdout.splitlines()
    )
    return record
