"""`make test` leaves out what is marked thorough; `make test-all` and CI do not."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(target):
    text = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    return recipe.group(1)


def test_ci_runs_everything():
    """All that `make test` runs, and what it leaves out."""
    assert '-m "not parity and not thorough"' in commands("test")
    assert 'JDIST_THOROUGH=1 $(PYTEST) -m "not parity"' in commands("test-all")
    assert "\nmake test-all\n" in (ROOT / ".ci" / "run").read_text()
