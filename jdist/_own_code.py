"""A user's own code, found by `module:name` and kept apart when it raises."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def named(specification: str, argument: str) -> Any:
    """What a module calls so; modules are also looked for in the current folder.

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
