"""The exceptions that jdist raises, and the form of their messages.

A wrong kind of argument is a `TypeError` and a wrong value a `ValueError`, as in
Python itself. The classes here are for what those two cannot say: a proof that
failed, or hardware that is not there. All derive from `JdistError`.
"""

import math
import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias

Kind: TypeAlias = type | UnionType | tuple[type, ...]
"""A type as `isinstance` takes it."""


# Characters of a value that a message quotes.
LONGEST = 300


class JdistError(Exception):
    """Base class of the errors that only jdist can raise."""


class VerificationError(JdistError, AssertionError):
    """Two computations of a gradient differ by more than rounding can explain.

    Raised by `verify.Report.raise_if_failed`. It is an `AssertionError` too, so that
    a test runner counts it as a failed claim, not as a broken program.
    """


class Unavailable(JdistError):
    """Hardware or software that a call needs is missing.

    A row of the equivalence matrix raises it to be skipped *by name*; the message
    says what is missing.
    """


def extra(name: str) -> str:
    """The command that installs one of jdist's extras, given how jdist was installed.

    Args:
      name: Name of the extra, such as `"checkpoint"`.

    Example:
      >>> extra("tls").startswith("pip install ")
      True
    """
    root = Path(__file__).parents[1]
    # From a checkout the command names the folder, as jdist may not be installed. pip
    # finds an installed one, wherever it came from.
    if (root / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{root}[{name}]')}"
    return f"pip install 'jdist[{name}]'"


def requirement(call: str, rule: str, got: object, remedy: str = "") -> str:
    """Formats an error message: the argument, the rule, the value and a remedy.

    Args:
      call: Function and argument, such as `"shard_batch(sizes=...)"`.
      rule: What the argument must be, such as `"must add up to 8 examples"`.
      got: What was given; shown with `repr`, cut, unless it is a string.
      remedy: One or more full sentences on what to do instead.

    Example:
      >>> requirement("sgd(lr=...)", "must be at least 0", -1.0)
      '`sgd(lr=...)` must be at least 0. Got -1.0.'
    """
    shown = got if isinstance(got, str) else quoted(got)
    message = f"`{call}` {rule}. Got {shown}."
    return f"{message} {remedy}" if remedy else message


def value_error(call: str, rule: str, got: object, remedy: str = "") -> ValueError:
    """A `ValueError` whose message is `requirement` of the arguments."""
    return ValueError(requirement(call, rule, got, remedy))


def type_error(call: str, rule: str, got: object, remedy: str = "") -> TypeError:
    """A `TypeError` whose message is `requirement` of the arguments."""
    return TypeError(requirement(call, rule, got, remedy))


def quoted(value: object) -> str:
    """A value's `repr` for a message, cut.

    That of a model's gradient has thousands of lines.
    """
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def check_type(call: str, value: object, kind: Kind, rule: str) -> None:
    """Checks that a value is of a type.

    Args:
      call: Function and argument, as for `requirement`.
      value: What was given.
      kind: As for `isinstance`.
      rule: What the argument must be, such as `"must be a Schedule"`.

    Raises:
      TypeError: It is of another type.
    """
    if not isinstance(value, kind):
        raise TypeError(requirement(call, rule, quoted(value)))


def check_function(call: str, value: object, rule: str = "must be a function") -> None:
    """Checks that a value can be called.

    Args:
      call: Function and argument, as for `requirement`.
      value: What was given.
      rule: What the function must be, such as `"must be a function of a batch"`.

    Raises:
      TypeError: It cannot.
    """
    if not callable(value):
        raise TypeError(requirement(call, rule, quoted(value)))


def check_flags(call: str, **flags: Any) -> None:
    """Checks that arguments are True or False, and no truthy values.

    Args:
      call: The function, such as `"train_step"`.
      **flags: What was given, by the argument's name.

    Raises:
      TypeError: One is anything else.
    """
    for name, flag in flags.items():
        # A comparison of NumPy's numbers gives a bool of its own.
        plain = flag.item() if getattr(flag, "shape", None) == () else flag
        if not isinstance(plain, bool):
            argument = f"{call}({name}=...)"
            raise type_error(argument, "must be True or False", quoted(flag))


def check_sequence(call: str, values: Any, kind: Kind, rule: str) -> None:
    """Checks that a value is a sequence, but no text, of values of a type.

    Raises:
      TypeError: It is not.
    """
    several = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not several or not all(isinstance(value, kind) for value in values):
        raise TypeError(requirement(call, rule, quoted(values)))


def listed(call: str, values: Any, kind: Kind, rule: str) -> list[Any]:
    """The values of an iterable, but no text, in a list.

    Args:
      call: Function and argument, as for `requirement`.
      values: What was given.
      kind: What each must be, as for `isinstance`.
      rule: What the argument must be, such as `"must be names of workers"`.

    Raises:
      TypeError: It is none, or a value is of another type.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise TypeError(requirement(call, rule, quoted(values)))
    found = list(values)
    check_sequence(call, found, kind, rule)
    return found


def check_number(
    call: str,
    value: Any,
    rule: str,
    holds: Callable[[Any], bool],
    *,
    whole: bool = False,
) -> None:
    """Checks that a value is a real number, or a scalar array, that keeps a rule.

    Args:
      call: Function and argument, as for `requirement`.
      value: What was given.
      rule: What the number must be, such as `"must be above 0"`.
      holds: Whether a number keeps the rule; must be false for NaN if that is refused.
      whole: Whether it must be an integer.

    Raises:
      TypeError: It is no number, or no integer where it must be one.
      ValueError: It breaks the rule.
    """
    number = value.item() if getattr(value, "shape", None) == () else value
    # True is an int, and no number.
    if isinstance(number, bool) or not isinstance(number, Integral if whole else Real):
        kind = "an integer" if whole else "a number"
        raise TypeError(requirement(call, f"{rule}, {kind}", quoted(value)))
    if not holds(number):
        raise ValueError(requirement(call, rule, number))


def check_at_least(call: str, value: Any, least: int, reason: str = "") -> None:
    """Checks that a value is an integer, and not below a number.

    Args:
      call: Function and argument, as for `requirement`.
      value: What was given.
      least: The smallest number that is allowed.
      reason: What the rule says after the number, such as `", one per stage"`.

    Raises:
      TypeError: It is no integer.
      ValueError: It is below.
    """
    rule = f"must be at least {least}{reason}"
    check_number(call, value, rule, lambda n: n >= least, whole=True)


def check_positive_seconds(call: str, value: Any) -> None:
    """Checks that a value is a time to wait: a number above 0, and not infinite.

    Raises:
      TypeError: It is no number.
      ValueError: It is 0, negative, infinite or NaN.
    """
    rule = "must be a positive number of seconds"
    check_number(call, value, rule, lambda seconds: 0 < seconds < math.inf)


def check_choice(call: str, value: object, known: Iterable[object]) -> None:
    """Checks that a value is one of a few names.

    Args:
      call: Function and argument, as for `requirement`.
      value: What was given.
      known: The names, in the order in which the message lists them.

    Raises:
      ValueError: It is none of them.
    """
    # An iterator can be read only once, and the message lists the names too.
    known = tuple(known)
    # An array, compared element by element, has no truth: it cannot be hashed either.
    if not isinstance(value, Hashable) or value not in known:
        rule = f"must be one of {', '.join(map(repr, known))}"
        raise ValueError(requirement(call, rule, quoted(value)))
