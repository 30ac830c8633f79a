"""Commands that run a user's own code: whose fault an error is, by the exit status."""

import pytest

from jdist import JdistError
from jdist._own_code import OwnCodeRaised, named, own_code, run_command


def raising(error):
    """A command that raises."""

    def run():
        raise error

    return run


def test_a_command_that_returns_has_its_own_status(capsys):
    assert run_command(lambda: 3, (ValueError,)) == 3
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("no such [option]"), 2, "error: no such [option]\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (JdistError("unknown"), 2, "error: unknown\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_misuse_and_interrupts_are_one_line(capsys, error, status, words):
    """As they are written: brackets are no markup; without a word, the type's name."""
    assert run_command(raising(error), (ValueError, JdistError)) == status
    assert capsys.readouterr().err == words


@pytest.mark.parametrize("error", [KeyError("lost"), TypeError("ours")])
def test_other_errors_are_shown_with_their_traceback(capsys, error):
    """They are no misuse, and no verdict either."""
    assert run_command(raising(error), (ValueError,)) == 4
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert type(error).__name__ in shown
    assert shown.splitlines()[-1] == f"error: {error}"


def test_an_error_of_the_users_code_is_theirs(capsys):
    """Although it is of a type that would be misuse if it were ours."""

    def run():
        with own_code("job"):
            raise ValueError("the disk is full")

    assert run_command(run, (ValueError, JdistError)) == 4
    shown = capsys.readouterr().err
    assert "ValueError: the disk is full" in shown
    # The traceback is of their code: the wrapper that we raise is not shown.
    assert "OwnCodeRaised" not in shown
    assert shown.splitlines()[-1] == "error: job raised ValueError: the disk is full"


@pytest.mark.parametrize("text", ["", "module", ":name", "module:", "module name"])
def test_a_text_without_both_parts_is_refused(text):
    with pytest.raises(ValueError, match="must be module:name, such as mymodule:job"):
        named(text, "job")


def test_what_a_module_defines_is_found(tmp_path, monkeypatch):
    """In the current folder, and in packages there, each imported once."""
    (tmp_path / "inner_package").mkdir()
    (tmp_path / "inner_package" / "__init__.py").write_text("loaded = []\n")
    module = "from inner_package import loaded\nloaded.append(1)\nvalue = {'a': 1}\n"
    (tmp_path / "inner_package" / "part.py").write_text(module)
    (tmp_path / "inner_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert named("inner_package.part:value", "job") == {"a": 1}
    assert named("inner_package:loaded", "job") == [1]
    for text, rule in (
        ("inner_package.absent:value", "'inner_package.absent', which does not exist"),
        ("inner_absent.part:value", "'inner_absent.part', which does not exist"),
        ("inner_package.part:absent", "'absent', which inner_package.part does not"),
    ):
        with pytest.raises(ValueError, match=rule):
            named(text, "job")
    with pytest.raises(OwnCodeRaised, match="importing inner_broken raised ModuleNot"):
        named("inner_broken:value", "job")
