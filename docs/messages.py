"""The messages of all errors, read from the sources: `docs/reference/messages.md`."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

GAP = "…"
"""Stands where a message has a value."""

OF_PYTHON = {
    "ValueError",
    "TypeError",
    "RuntimeError",
    "NotImplementedError",
    "OSError",
}
"""Classes that jdist raises beside its own."""


class Message(NamedTuple):
    """An error that jdist raises."""

    part: str
    """Such as `rpc`."""

    error: str
    """The name of its class."""

    text: str
    """With gaps."""

    def pattern(self) -> str:
        """A regular expression for the whole message."""
        return ".*".join(re.escape(piece) for piece in self.text.split(GAP))


def messages(package: Path, public: set[str]) -> Iterator[Message]:
    """The messages that are written in a package, each once, by part and text.

    Where a message depends on a condition there is one for each of its forms.

    Args:
      package: Its folder.
      public: The names of its exceptions that users may see, beside Python's.
    """
    trees = {
        path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))
    }
    worded: dict[str, set[str]] = {}  # by functions that return a message
    rules: Known = {}
    for tree in trees.values():
        reader = _Reader({})
        constants = reader.read(tree.body, {})
        rules |= {name: texts for name, texts in constants.items() if name in RULES}
        for name, texts in reader.returned.items():
            worded.setdefault(name, set()).update(texts)
    for name in ("requirement", *_ERRORS):
        worded.pop(name, None)  # its arguments say more than its form
    found = set()
    for path, tree in trees.items():
        folders = path.relative_to(package).parts[:-1]
        part = folders[0].lstrip("_") if folders else package.name
        reader = _Reader(worded)
        reader.read(tree.body, rules)
        found |= {
            Message(part, error, " ".join(text.split()))
            for error, texts in reader.called
            if error in OF_PYTHON | public
            for text in texts
        }
    # A single word is an argument of a class that words its message itself.
    return iter(sorted(each for each in found if re.search(r"\w \w", each.text)))


RULES = {"AT_LEAST_0"}
"""The constants of `jdist.optim` that other modules give to `check_scalar`."""

_CHECKS = {
    "check_type": ("TypeError", 3),
    "check_sequence": ("TypeError", 3),
    "check_number": ("ValueError", 2),
    "check_scalar": ("ValueError", 1),
}
"""Functions that raise: the class, and the position of the rule among the arguments."""

_ERRORS = {"value_error": "ValueError", "type_error": "TypeError"}
"""Functions that make an error of what `requirement` takes: the class."""

Known = dict[str, set[str]]
"""The texts that names may stand for."""


class _Reader:
    """Follows the statements of a module, and what texts their names may stand for.

    Args:
      worded: The texts that functions return, by name.

    Attributes:
      called: Each call's last name, and the texts of its first argument.
      returned: The texts that functions return, by name.
    """

    def __init__(self, worded: dict[str, set[str]]) -> None:
        self._worded = worded
        self.called: list[tuple[str, set[str]]] = []
        self.returned: dict[str, set[str]] = {}

    def read(self, body: Iterable[ast.stmt], known: Known, of: str = "") -> Known:
        """What is known after these statements of the function `of`."""
        for statement in body:
            known = self._after(statement, known, of)
        return known

    def _after(self, statement: ast.stmt, known: Known, of: str) -> Known:
        blocks = [
            getattr(statement, name, []) for name in ("body", "orelse", "finalbody")
        ]
        blocks += [each.body for each in getattr(statement, "handlers", [])]
        blocks += [each.body for each in getattr(statement, "cases", [])]
        own = {id(node): node for node in ast.walk(statement)}
        for inner in itertools.chain.from_iterable(blocks):
            for node in ast.walk(inner):
                own.pop(id(node), None)  # contexts such as ast.Load() are shared
        for node in own.values():
            if isinstance(node, ast.Call) and node.args:
                self._note(node, known)
        match statement:
            case ast.FunctionDef(name=name, body=body):
                self.read(body, known, name)
                return known
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return known | {name: self._texts(value, known)}
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                longer = _joined([known.get(name, {GAP}), self._texts(value, known)])
                return known | {name: longer}
            case ast.Return(value=ast.expr() as value):
                self.returned.setdefault(of, set()).update(self._texts(value, known))
        # Of a condition either block may run, and of most others none.
        ends = [known] * (not (isinstance(statement, ast.If) and statement.orelse))
        ends += [self.read(block, known, of) for block in blocks if block]
        return {
            name: set().union(*(end.get(name, set()) for end in ends))
            for name in set().union(*ends)
        }

    def _note(self, call: ast.Call, known: Known) -> None:
        name = _name(call)
        self.called.append((name, self._texts(call.args[0], known)))
        if error := _ERRORS.get(name):
            self.called.append((error, self._texts(call, known)))
        if check := _CHECKS.get(name):
            error, rule = check[0], call.args[check[1]]
            pieces = [{"`"}, self._texts(call.args[0], known), {"` "}]
            pieces += [self._texts(rule, known), {f". Got {GAP}."}]
            self.called.append((error, _joined(pieces)))

    def _texts(self, node: ast.expr, known: Known) -> set[str]:
        """A message's words in all its forms, with a gap for each value."""
        found = {GAP}
        match node:
            case ast.Constant(value=str(text)):
                found = {text}
            case ast.JoinedStr(values=parts):
                found = _joined([self._texts(part, known) for part in parts])
            case (
                ast.FormattedValue(value=ast.Name() | ast.IfExp() as value)
                | ast.Call(func=ast.Name(id="Rule"), args=[value, *_])
            ):
                found = self._texts(value, known)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = _joined([self._texts(left, known), self._texts(right, known)])
            case ast.BinOp(left=left, op=ast.Mult()):
                found = {"", *self._texts(left, known)}
            case ast.IfExp(body=body, orelse=orelse):
                found = self._texts(body, known) | self._texts(orelse, known)
            case ast.Name(id=name) if name in known:
                found = known[name]
            case ast.Call(func=ast.Name(id=name), args=[call, rule, _, *more]) if (
                name == "requirement" or name in _ERRORS
            ):
                pieces = [{"`"}, self._texts(call, known), {"` "}]
                pieces += [self._texts(rule, known), {f". Got {GAP}."}]
                remedy = [_joined([{" "}, self._texts(each, known)]) for each in more]
                found = _joined([*pieces, *remedy])
            case ast.Call() if _name(node) in self._worded:
                found = self._worded[_name(node)]
        return found


_MOST = 16
"""Forms of one message; of more, those parts that vary are gaps."""


def _joined(pieces: Iterable[set[str]]) -> set[str]:
    """One of each, in a row."""
    found = {""}
    for texts in pieces:
        fits = len(found) * len(texts) <= _MOST
        found = {one + other for one in found for other in (texts if fits else {GAP})}
    return found


def _name(call: ast.Call) -> str:
    """The last name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def rows(package: Path, public: set[str]) -> Iterator[tuple[str, ...]]:
    """The part of each message, its head, its class, and the rest, as Markdown."""
    for message in messages(package, public):
        head, _, rest = message.text.partition(". ")
        rest = re.sub(rf"^Got {GAP}\.? ?", "", rest)
        yield message.part, _shown(head), f"`{message.error}`", _shown(rest)


def _shown(text: str) -> str:
    """Text whose markup is code alone."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [
        re.sub(r"([\\*_\[\]<>$`{}#~])", r"\\\1", each) for each in pieces[::2]
    ]
    return "".join(pieces).replace("|", r"\|")
