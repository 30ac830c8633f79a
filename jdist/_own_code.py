"""User code named by `module:name`, and the exit status of commands that run it.

Exceptions of the user's code are kept apart from jdist's, and the exit status says
which of the two ended the command.
"""

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jdist._errors import JdistError, quoted, requirement


class OwnCodeRaised(JdistError):
    """The user's own code raised an exception, which is the cause of this one.

    Keeps a `ValueError` of the user's code apart from one about a wrong call of jdist.
    """


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Turns exceptions of its block, `sys.exit` included, into `OwnCodeRaised`."""
    try:
        yield
    except OwnCodeRaised:
        # An inner block has named the code already.
        raise
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        raise OwnCodeRaised(f"{what} raised {name}: {error}") from error


def run_command(run: Callable[[], int], misuse: tuple[type[Exception], ...]) -> int:
    """Runs a command, and prints an error as one line on standard error.

    Args:
      run: The command, which returns its status.
      misuse: Exceptions that it raises when it is called with wrong arguments.

    Returns:
      The command's status; 2 for misuse; 4 for any other exception, with a traceback;
      130 if interrupted.
    """
    try:
        return run()
    except OwnCodeRaised as error:
        # Before `misuse`, which may hold its base class. The user's traceback alone.
        traceback.print_exception(error.__cause__)
        told, status = str(error), 4
    except KeyboardInterrupt:
        told, status = "interrupted", 130
    except misuse as error:
        told, status = str(error) or type(error).__name__, 2
    except Exception as error:  # noqa: BLE001
        # Python's exit status of an exception is 1, which here means a failed check.
        traceback.print_exception(error)
        told, status = str(error) or type(error).__name__, 4
    # As text: rich would read brackets in a message as markup.
    console = Console(stderr=True)
    console.print("[red]error:[/red]", Text(told), highlight=False)
    return status


def writable_file(text: str) -> Path:
    """An option's file, which need not exist; for argparse's `type`.

    Checked before the command does its work, whose findings could not be kept.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists, not {text}"
        )
    return path


def named(specification: str, argument: str) -> Any:
    """Imports the object named by `module:name`; searches the current folder too.

    Args:
      specification: `module:name`.
      argument: The name of the argument, for error messages.

    Raises:
      ValueError: The text is not `module:name`, or there is no such module or name.
      OwnCodeRaised: The module raised when it was imported.
    """
    module_name, colon, name = specification.partition(":")
    if not (colon and module_name and name):
        rule = f"must be module:name, such as mymodule:{argument}"
        raise ValueError(requirement(argument, rule, quoted(specification)))
    # `python -m` searches the current folder; a console script does not.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not _exists(module_name):
        got = f"{specification}; looked in {Path.cwd()} and the installed packages"
        rule = f"names the module {module_name!r}, which does not exist"
        raise ValueError(requirement(argument, rule, got))
    with own_code(f"importing {module_name}"):
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        rule = f"names {name!r}, which {module_name} does not define"
        raise ValueError(requirement(argument, rule, specification))
    return getattr(module, name)


def _exists(module_name: str) -> bool:
    """Whether a module exists; imports the packages above it, but not the module."""
    # `find_spec` raises where a package above is missing: those are checked first.
    package, dot, _ = module_name.rpartition(".")
    if dot and not _exists(package):
        return False
    with own_code(f"importing {package}"):
        return importlib.util.find_spec(module_name) is not None
