"""The table of every public name, read from the sources: `docs/reference/names.md`."""

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

GENERATED = {"benchmarks_all", "conformance", "proved", "strangers"}
"""Pages whose text is data: a name on one of them is not told."""

BESIDE = {
    "architecture",
    "benchmarks",
    "changelog",
    "contributing",
    "examples",
    "index",
}
"""Pages that are no guides."""

CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
"""Blocks and words of code: outside of them a name may be a plain word."""


class PublicName(NamedTuple):
    """A name that a part exports."""

    part: str
    """Such as `rpc`, or `data_parallel.hooks`."""

    name: str

    job: str
    """The first sentence of its docstring."""

    guide: str | None
    """The page that tells it, without the suffix; None if none does."""


def public_names(docs: Path, faces: Iterable[str]) -> Iterator[PublicName]:
    """The names of the faces in their order, each with its job and its guide.

    Args:
      docs: The folder of the pages.
      faces: Modules, such as `jdist.rpc`.
    """
    pages = {
        page.stem: "\n".join(CODE.findall(page.read_text()))
        for page in sorted(docs.glob("*.md"))
        if page.stem not in GENERATED | BESIDE
    }
    written = dict(_written(docs.parent / "jdist"))
    for face in faces:
        module = importlib.import_module(face)
        part = face.removeprefix("jdist.")
        home = part.partition(".")[0]
        own = sorted(pages, key=lambda page: page != home)
        for name in module.__all__:
            word = re.compile(rf"\b{name}\b")
            guide = next((page for page in own if word.search(pages[page])), None)
            found = getattr(module, name)
            if (
                inspect.isclass(found)
                or inspect.isroutine(found)
                or (inspect.ismodule(found))
            ):
                text = inspect.getdoc(found) or ""
            else:  # a constant or an alias, whose type has another docstring
                text = written.get(name, "")
            yield PublicName(part, name, _first_sentence(text), guide)


def _written(package: Path) -> Iterator[tuple[str, str]]:
    """The docstrings under assignments, of constants and aliases."""
    for path in sorted(package.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        for one, after in itertools.pairwise(body):
            match one, after:
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield name, text


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", paragraph)[0]


def rows(docs: Path, faces: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The part of each name, the name, its job and its guide, as Markdown."""
    for each in public_names(docs, faces):
        job = (
            re.sub(r"([*_$<>\[\]|])", r"\\\1", each.job)
            if "`" not in each.job
            else (each.job.replace("|", r"\|"))
        )
        link = f"[{each.guide}](../{each.guide}.md)" if each.guide else ""
        yield f"jdist.{each.part}", f"`{each.name}`", job, link
