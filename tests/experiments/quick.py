"""Running an experiment as a user does: a fresh process, a plain environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_quick(name, folder):
    """Runs `python -m experiments NAME --quick`; it must hold and say so at the end."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "experiments", name, "--quick", "--out", str(folder)],
        capture_output=True, text=True, timeout=280, cwd=ROOT, env=plain,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Proved in ")
    # The whole line is made of the claims that were judged.
    record = json.loads((folder / f"{name}.json").read_text())
    assert record["outcome"] in last
    assert all(claim["verdict"] != "does not hold" for claim in record["claims"])
