"""The site: how Sphinx builds the pages of this folder. `make docs` calls it."""

import __future__

import hashlib
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
messages = importlib.import_module("messages")
public_names = importlib.import_module("public_names")


class _AnnotationsAsWritten(SourceFileLoader):
    """Keeps annotations as text: `lr: Hyperparameter`, not the union it stands for."""

    def source_to_code(self, data: bytes, path: str, **_: object) -> CodeType:  # type: ignore[override]
        flags = __future__.annotations.compiler_flag
        return compile(data, path, "exec", flags=flags, dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        """From the source, never from the cache, which has the annotations' values."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN206
        if fullname.partition(".")[0] != "jdist":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _AnnotationsAsWritten(fullname, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def _sources() -> str:
    """A hash of what the cells import."""
    files = [
        path for part in ("jdist", "examples") for path in (ROOT / part).rglob("*.py")
    ]
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(files))
    ).hexdigest()[:16]


project = "jdist"
author = "the authors of jdist"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
html_theme = "sphinx_book_theme"
html_title = "jdist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"show_navbar_depth": 1, "home_page_in_toc": True}
exclude_patterns = ["_build"]

# Pages in Markdown. A heading's anchor is the one that a forge gives it.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# Cells run when the site is built, unless neither they nor the library have changed.
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-cells" / _sources())
nb_execution_raise_on_error = True
nb_execution_timeout = 120
# The prompts of examples and what they print are not copied.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The reference. `text` in docstrings is code, as in Markdown.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"  # of a module: in the order of `__all__`
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields are documented once more, by their annotations
linkcheck_ignore = [r"http://127\.0\.0\.1.*"]

BESIDE = {"../examples/README.md": "examples.md"}
FACES = re.compile(r"^\.\. automodule:: (jdist[\w.]*)$", re.MULTILINE)
SECTION = re.compile(r"\s*(Args|Returns|Raises|Yields|Attributes|Example|Examples):$")


def _shown(line: str) -> str:
    """Text outside `code`, with what reStructuredText would take for markup escaped."""
    parts = re.split(r"(`[^`]*`)", line)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*|\\])", r"\\\1", parts[i])
        parts[i] = re.sub(r"(?<=\w)_(?=\W|$)", r"\_", parts[i])
        if i and parts[i][:1].isalnum():  # `Param`s: markup ends before a separator
            parts[i] = r"\ " + parts[i]
    return "".join(parts)


def as_rst(lines: list[str]) -> Iterator[str]:
    """A docstring's lines; a paragraph indented by four or more is shown as it is."""
    literal: int | None = None  # the indentation that ends the literal block
    before, blank = 0, True
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            blank = True
            yield line
            continue
        if literal is not None and indent <= literal:
            literal = None
        if literal is None and blank and indent >= before + 4:
            literal = before
            yield " " * before + "::"
            yield ""
        example = line.lstrip().startswith((">>>", "..."))
        yield line if literal is not None or example else _shown(line)
        if literal is None:
            before = indent
        blank = False


def _docstring(_app, _what, _name, _obj, _options, lines):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    lines[:] = list(as_rst(lines))


def _signature(_app, what, _name, obj, _options, signature, returns):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """As the source has it."""
    if what != "function" or signature is None:
        return signature, returns
    return stringify_signature(inspect.signature(obj)), None


def _faces() -> list[str]:
    """The modules that the reference shows."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return [face for page in pages for face in FACES.findall(page.read_text())]


def _functions_first(_app: Sphinx) -> None:
    """Orders the names of each face: functions, classes, exceptions, and the rest.

    A reader looks for what to call; the classes are what it takes and returns.
    """

    def group(found: object) -> int:
        if not isinstance(found, type):
            return 0 if callable(found) else 3
        return 2 if issubclass(found, BaseException) else 1

    for module in map(importlib.import_module, _faces()):
        module.__all__.sort(key=lambda name: (group(getattr(module, name)), name))


def _every_name_once(app: Sphinx, error: Exception | None) -> None:
    """The reference shows each public object under one name, and nothing private."""
    if error or app.builder.name != "html":
        return
    faces = _faces()
    names: dict[int, list[str]] = {}  # of each object: two parts may offer the same
    for face in faces:
        module = importlib.import_module(face)
        for name in module.__all__:
            if f"{face}.{name}" not in faces:
                names.setdefault(id(getattr(module, name)), []).append(f"{face}.{name}")
    entries = app.env.get_domain("py").data["objects"]
    shown = {name for name, entry in entries.items() if not entry.aliased}
    wrong = [same for same in names.values() if len(shown.intersection(same)) != 1]
    private = sorted(name for name in shown if re.search(r"\._(?!_)", name))
    if wrong or private:
        raise ExtensionError(f"not shown once: {wrong}; shown but private: {private}")


def _list_of_pages(app: Sphinx, error: Exception | None) -> None:
    """`llms.txt`: the front page's lists of pages, each with its first sentence."""
    if error or app.builder.name != "html":
        return
    summary = importlib.import_module("jdist").__doc__.splitlines()[0]
    lines = ["# jdist", "", f"> {summary}"]
    for part in app.env.get_doctree("index").findall(addnodes.toctree):
        lines += ["", f"## {part['caption']}", ""]
        for _, name in part["entries"]:
            pages = [name, *app.env.toctree_includes.get(name, [])]
            lines += [_line_of_page(app, page) for page in pages]
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def _line_of_page(app: Sphinx, name: str) -> str:
    """Title, address and first sentence; a reference's source has no docstrings."""
    for paragraph in app.env.get_doctree(name).findall(nodes.paragraph):
        words = " ".join(paragraph.astext().split())
        sentence = re.split(r"(?<=\w[.?])\s(?=[A-Z])", words)[0]
        source = f"_sources/{name}{Path(app.env.doc2path(name)).suffix}"
        address = f"{name}.html" if name.startswith("reference/") else source
        return f"- [{app.env.titles[name].astext()}]({address}): {sentence}"
    raise ExtensionError(f"{name} has no sentence that llms.txt could show")


def _messages(_app: Sphinx, name: str, text: list[str]) -> None:
    """Appends to its page what the sources say of errors."""
    if name == "reference/messages":
        public = (
            getattr(module, name)
            for module in map(importlib.import_module, _faces())
            for name in module.__all__
        )
        errors = {
            each.__name__
            for each in public
            if isinstance(each, type) and issubclass(each, Exception)
        }
        heads = ("it begins with", "class", "what it says besides")
        text[0] += _tables(heads, messages.rows(ROOT / "jdist", errors))


def _names(_app: Sphinx, name: str, text: list[str]) -> None:
    """Appends the table of every public name to its page."""
    if name == "reference/names":
        faces = sorted(face for face in _faces() if face != "jdist")
        heads = ("name", "job", "guide")
        text[0] += _tables(heads, public_names.rows(ROOT / "docs", faces))


def _defects(_app: Sphinx, name: str, text: list[str]) -> None:
    """Appends the table of planted defects to the judge's page."""
    if name == "reference/verify":
        planted = importlib.import_module("jdist.verify.defects").ALL
        heads = ("defect", "of a step of kind", "what the wrong step does", "needs")
        rows = (
            ("Planted defects", d.name, ", ".join(d.kinds), d.sentence, d.needs)
            for d in planted
        )
        text[0] += _tables(heads, rows)


def _tables(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Markdown: a table for each part, which is the first cell of a row."""
    lines: list[str] = []
    for part, group in itertools.groupby(rows, key=lambda row: row[0]):
        lines += ["", f"## {part}", "", f"| {' | '.join(heads)} |"]
        lines.append("|---" * len(heads) + "|")
        lines += [f"| {' | '.join(cells)} |" for _, *cells in group]
    return "\n".join(lines) + "\n"


def _links(_app: Sphinx, _name: str, text: list[str]) -> None:
    """Files beside this folder that the site has as pages."""
    for file, page in BESIDE.items():
        text[0] = text[0].replace(f"]({file}", f"]({page}")


def _example_links(_app: Sphinx, path: Path, _parent: str, text: list[str]) -> None:
    """The programs lie beside the included page, not beside the one that includes."""
    if path.parent.name == "examples":
        text[0] = re.sub(r"\]\((\w+\.py)\)", r"](../examples/\1)", text[0])


def setup(app: Sphinx) -> None:
    """Connects what is above."""
    # Before napoleon, which reads the sections (500).
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("builder-inited", _functions_first)
    app.connect("source-read", _messages)
    app.connect("source-read", _names)
    app.connect("source-read", _defects)
    app.connect("source-read", _links)
    app.connect("include-read", _example_links)
    app.connect("build-finished", _every_name_once)
    app.connect("build-finished", _list_of_pages)
