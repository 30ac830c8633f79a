"""The messages of all errors, read from the sources: `docs/reference/messages.md`."""

import ast
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

    Args:
      package: Its folder.
      public: The names of its exceptions that users may see, beside Python's.
    """
    trees = {
        path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))
    }
    functions = [
        (path, {**_names(tree.body), **_names(nodes)}, function.name, nodes)
        for path, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for nodes in [list(ast.walk(function))]
    ]
    worded: dict[str, list[str]] = {}  # by functions that return a message
    for _, known, name, nodes in functions:
        for node in nodes:
            if isinstance(node, ast.Return) and node.value is not None:
                worded.setdefault(name, []).append(_text(node.value, known))
    del worded["requirement"]  # its arguments say more than its form
    found = set()
    for path, known, _, nodes in functions:
        folders = path.relative_to(package).parts[:-1]
        part = folders[0].lstrip("_") if folders else package.name
        for call in nodes:
            if isinstance(call, ast.Call) and call.args:
                error, words = _name(call), call.args[0]
                elsewhere = isinstance(words, ast.Call) and worded.get(_name(words))
                texts = elsewhere or [_text(words, known)]
                if error in OF_PYTHON | public:
                    found |= {
                        Message(part, error, " ".join(text.split())) for text in texts
                    }
    # A single word is an argument of a class that words its message itself.
    return iter(sorted(each for each in found if re.search(r"\w \w", each.text)))


def _name(call: ast.Call) -> str:
    """The last name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def _names(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """What simple names were last set to."""
    return {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _text(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """A message's words, with a gap for each value."""
    words = GAP
    match node:
        case ast.Constant(value=str(text)):
            words = text
        case ast.JoinedStr(values=parts):
            words = "".join(_text(part, known) for part in parts)
        case ast.FormattedValue(value=ast.Name() as value):
            words = _text(value, known)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            words = _text(left, known) + _text(right, known)
        case ast.IfExp(body=body):
            words = _text(body, known)
        case ast.Name(id=name) if name in known:
            rest = {key: value for key, value in known.items() if key != name}
            words = _text(known[name], rest)
        case ast.Call(func=ast.Name(id="requirement"), args=[call, rule, _, *remedy]):
            more = "".join(" " + _text(each, known) for each in remedy)
            words = f"`{_text(call, known)}` {_text(rule, known)}. Got {GAP}.{more}"
    return words


def tables(package: Path, public: set[str]) -> str:
    """Markdown: for each part the heads of its messages, their class, and the rest."""
    lines: list[str] = []
    part = None
    for message in messages(package, public):
        if message.part != part:
            part = message.part
            lines += ["", f"## {part}", ""]
            lines += [
                "| it begins with | class | what it says besides |",
                "|---|---|---|",
            ]
        head, _, rest = message.text.partition(". ")
        rest = re.sub(rf"^Got {GAP}\.? ?", "", rest)
        lines.append(f"| {_shown(head)} | `{message.error}` | {_shown(rest)} |")
    return "\n".join(lines) + "\n"


def _shown(text: str) -> str:
    """Text whose markup is code alone."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [
        re.sub(r"([\\*_\[\]<>$`{}#~])", r"\\\1", each) for each in pieces[::2]
    ]
    return "".join(pieces).replace("|", r"\|")
