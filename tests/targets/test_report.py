"""The text of a report on a compiled program."""

import rich.console

from jdist.targets.report import CompiledProgram


def test_a_notebook_shows_what_is_printed(monkeypatch):
    """There rich would show it itself, and return an empty text."""
    program = CompiledProgram("v5p", 2**34, None, refused="It needs 17 GiB.")
    expected = str(program)
    assert "v5p: does not fit. It needs 17 GiB." in expected
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(program) == expected
