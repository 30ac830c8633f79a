"""What is planted in the user code of the tests, by stage and pass.

A module of its own, which that code imports when it runs: numbers among its globals
would be part of its program.
"""

import contextlib

_left: dict[tuple[int, str], int] = {}
"""How many more micro-batches go well."""


class Planted(RuntimeError):
    """What user code raises in the tests."""


def pass_by(stage, which):
    """Raises where that is planted."""
    if (stage, which) in _left:
        _left[stage, which] -= 1
        if _left[stage, which] < 0:
            raise Planted(f"planted in the {which} pass of stage {stage}")


@contextlib.contextmanager
def planted(stage, which, at):
    """Has a pass of a stage raise at a micro-batch and at those that follow."""
    _left[stage, which] = at
    try:
        yield
    finally:
        del _left[stage, which]
