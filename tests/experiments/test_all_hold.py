"""Every experiment's quick form holds, from a fresh process and a plain environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import _runner

ROOT = Path(__file__).parents[2]
# Run and looked at more closely by test_main_job.py.
OTHERS = [name for name in _runner.names() if name != "data_parallel_equivalence"]


@pytest.mark.parametrize("name", OTHERS)
def test_the_quick_form_holds(name, tmp_path):
    """Exit status 0, the line at the end, JSON, pictures and the page."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "experiments", name, "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=280, cwd=ROOT, env=plain,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Proved in ")
    assert (tmp_path / f"{name}.json").exists()
    assert (tmp_path / "report.html").exists()
    assert list(tmp_path.glob(f"{name}-*.png"))
