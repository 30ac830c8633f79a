"""Every experiment's quick form holds, from a fresh process and a plain environment."""

import pytest

from experiments import _runner
from tests.experiments.quick import run_quick

# Run and looked at more closely by test_main_job.py.
OTHERS = [name for name in _runner.names() if name != "data_parallel_equivalence"]


@pytest.mark.parametrize("name", OTHERS)
def test_the_quick_form_holds(name, tmp_path):
    """Exit status 0, the line at the end, JSON, pictures and the page."""
    run_quick(name, tmp_path)
    assert (tmp_path / f"{name}.json").exists()
    assert (tmp_path / "report.html").exists()
    assert list(tmp_path.glob(f"{name}-*.png"))
