"""A user's own code, found by `module:name` and kept apart when it raises.

And the commands that run it, whose exit status says whose fault an error is.
"""

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

from jdist._errors import JdistError, requirement


class OwnCodeRaised(JdistError):
    """The user's own code raised: the cause is what it raised.

    It keeps a `ValueError` of theirs apart from one about a wrong call of ours.
    """


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Everything raised inside, `sys.exit` included, becomes `OwnCodeRaised`."""
    try:
        yield
    except OwnCodeRaised:
        raise
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        raise OwnCodeRaised(f"{what} raised {name}: {error}") from error


def run_command(run: Callable[[], int], misuse: tuple[type[Exception], ...]) -> int:
    """The exit status of a command; an error is told in a line on standard error.

    Args:
      run: The command, which returns its status.
      misuse: What it raises where it was called wrongly.

    Returns:
      The command's status; 2 for misuse; 4 where code raised, with a traceback; 130
      where it was interrupted.
    """
    try:
        return run()
    except OwnCodeRaised as error:
        traceback.print_exception(error.__cause__)
        told, status = str(error), 4
    except KeyboardInterrupt:
        told, status = "interrupted", 130
    except misuse as error:
        told, status = str(error) or type(error).__name__, 2
    except Exception as error:  # noqa: BLE001
        # Python's own exit status for it is 1, which here is a verdict.
        traceback.print_exception(error)
        told, status = str(error) or type(error).__name__, 4
    # As text: rich would take brackets in a message for markup.
    console = Console(stderr=True)
    console.print("[red]error:[/red]", Text(told), highlight=False)
    return status


def named(specification: str, argument: str) -> Any:
    """The object that `module:name` names; the current folder is searched too.

    Args:
      specification: `module:name`.
      argument: What it is for, for the messages.

    Raises:
      ValueError: The text is not `module:name`, or there is no such module or name.
      OwnCodeRaised: The module raised when it was imported.
    """
    module_name, colon, name = specification.partition(":")
    if not (colon and module_name and name):
        rule = f"must be module:name, such as mymodule:{argument}"
        raise ValueError(requirement(argument, rule, repr(specification)))
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
    """Whether it can be found; its packages are imported, the module is not."""
    package, dot, _ = module_name.rpartition(".")
    if dot and not _exists(package):
        return False
    with own_code(f"importing {package}"):
        return importlib.util.find_spec(module_name) is not None
