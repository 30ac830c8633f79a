"""`make test` leaves out what is marked thorough; CI does not."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(target):
    text = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    return recipe.group(1)


def test_ci_runs_everything():
    """All that `make test` runs, what it leaves out, and what rests on XLA again."""
    others = "not parity and not compilers"
    assert f'$(PYTEST) -m "{others.replace(" and", " and not thorough and")}"' in (
        commands("test")
    )
    marks = f"(thorough or optimized or compiled) and {others}"
    assert f'JDIST_THOROUGH=1 $(PYTEST) -m "{marks}"' in commands("test-thorough")
    assert f'JDIST_THOROUGH=1 $(PYTEST) -m "{others}"' in commands("test-all")
    assert "-m parity tests" in commands("parity")
    ci = (ROOT / ".ci" / "run").read_text()
    for target in ("test", "test-thorough", "lint", "targets", "parity"):
        assert f"\nmake {target}\n" in ci
