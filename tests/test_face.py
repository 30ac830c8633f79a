"""What `import jdist` brings: little, and everything when asked for."""

import inspect
import re
import subprocess
import sys

import pytest

import jdist

PROGRAM = """
import sys
import jdist

assert "jax" not in sys.modules, "jdist alone imports JAX"
assert not [m for m in sys.modules if m.startswith("jdist.") and "._" not in m]
shown = set(dir(jdist))
assert "jax" not in sys.modules, "to list the parts imports JAX"
assert jdist.optim.sgd and jdist.optim is sys.modules["jdist.optim"]
assert "jax" in sys.modules and "jdist.rpc" not in sys.modules
assert set(dir(jdist)) == shown
"""


def test_jdist_is_cheap_and_its_parts_come_when_they_are_asked_for():
    """In a fresh process: no JAX, then one part and what is below it."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_what_is_no_part_is_no_attribute():
    """As of any module, so that `hasattr` and pickles work."""
    with pytest.raises(AttributeError, match="'jdist' has no attribute 'optimm'"):
        jdist.optimm  # noqa: B018
    assert not hasattr(jdist, "__wrapped__")


@pytest.mark.parametrize("part", ["optim", "segment", "verify"])
def test_a_part_shows_its_face_and_nothing_else(part):
    """Tab completion lists the names of `__all__`, each of which is there."""
    module = getattr(jdist, part)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_parts_are_those_of_the_docstring():
    """Each is told in one line."""
    told = [line for line in jdist.__doc__.splitlines() if line.startswith("- `jdist.")]
    named = {line.split("`")[1].removeprefix("jdist.") for line in told}
    exceptions = {"JdistError", "Unavailable", "VerificationError"}
    assert set(dir(jdist)) == named | exceptions | {"__version__"}


def test_signatures_are_as_written():
    """`help` shows the names that the source has, not what they stand for.

    A function whose annotations are expanded to JAX's private names, or into a line
    that nobody reads, belongs in a module with `from __future__ import annotations`.
    """
    for part in dir(jdist):
        module = getattr(jdist, part)
        for name in getattr(module, "__all__", ()):
            if inspect.isfunction(found := getattr(module, name)):
                shown = str(inspect.signature(found))
                assert not re.search(r"jaxlib|jax\._src", shown), f"{part}.{name}"
                assert len(shown) < 600, f"{part}.{name}"
