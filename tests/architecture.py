"""Reads the sources and lists every departure from the house in docs/design.md.

Only the syntax tree is read: nothing is imported, so the check takes milliseconds and
sees files that would not import.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

GROUND = {"_errors", "_tree", "_lru_cache", "_compat"}
NOTHING: set[str] = set()
MAY_IMPORT = {
    **dict.fromkeys(GROUND, NOTHING),
    "_compat": {"_errors"},
    **dict.fromkeys(("segment", "reduction", "optim", "verify", "rpc"), GROUND),
    "_checkpoint": GROUND,
    "_fit": GROUND | {"_checkpoint", "reduction"},
    "data_parallel": GROUND | {"_checkpoint", "_fit", "reduction", "optim", "segment"},
    "autograd": GROUND | {"_checkpoint", "rpc", "segment", "reduction", "optim"},
    "pipeline": GROUND
    | {"_checkpoint", "_fit", "rpc", "segment", "reduction", "optim"},
    "launch": GROUND | {"rpc"},
    "matrix": GROUND
    | {"autograd", "data_parallel", "optim", "pipeline", "reduction", "rpc", "segment"},
    "__init__": GROUND,
    "__main__": GROUND,
}
FUNCTION_LINES = 60
FORBIDDEN_CALLS = {"print": "printing", "sleep": "sleeping", "breakpoint": "breakpoint"}


def violations(root: Path) -> list[str]:
    """Every departure under `root`, as `file:line: what is wrong`."""
    found = []
    for folder in ("jdist", "experiments", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            tree = ast.parse(path.read_text(), name)
            found += [f"{name}:{line}: {what}" for line, what in _in_file(name, tree)]
    return found


def _in_file(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not ast.get_docstring(tree):
        yield 1, "no module docstring"
    in_library = name.startswith("jdist/")
    knows_jax = name.startswith("jdist/_compat/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import(name, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(node)
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        elif isinstance(node, ast.Call) and in_library:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in FORBIDDEN_CALLS and not _is_console(node.func):
                yield node.lineno, f"{FORBIDDEN_CALLS[called]} in the library"
        elif (
            isinstance(node, ast.Attribute) and not knows_jax and _is_private_jax(node)
        ):
            yield node.lineno, "private JAX name outside _compat"


def _import(name: str, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.ImportFrom) and node.level:
        yield node.lineno, "relative import"
        return
    for module, imported in _modules(node):
        yield from ((node.lineno, what) for what in _one_import(name, module, imported))


def _one_import(name: str, module: str, imported: str) -> Iterator[str]:
    top, *rest = module.split(".")
    names_private = any(map(_is_private, [*rest, imported]))
    part = _part(name)
    if top == "jax" and names_private and not name.startswith("jdist/_compat/"):
        yield "private JAX name outside _compat"
    if name.startswith(("jdist/pipeline/schedule/", "jdist/pipeline/schedules/")):
        below = ("jdist._errors", "jdist.pipeline.schedule")
        if top == "jax" or (top == "jdist" and not module.startswith(below)):
            yield f"a schedule file imports {module}"
    if top != "jdist":
        return
    target = rest[0] if rest else imported
    if name.startswith("examples/"):
        if names_private or len(rest) > 1:
            yield f"an example imports what is not public, {module}.{imported}"
    elif name.startswith("experiments/"):
        if names_private:
            yield f"an experiment imports a private name, {module}.{imported}"
    elif target not in {part, "", "__version__"} | MAY_IMPORT[part]:
        yield f"{part} imports {target}, which is not below it"


def _modules(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    return [(node.module or "", alias.name) for alias in node.names]


def _part(name: str) -> str:
    return Path(name).parts[1].removesuffix(".py")


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node):
        docstring = node.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    if lines > FUNCTION_LINES:
        yield node.lineno, f"{node.name} is longer than {FUNCTION_LINES} lines"


def _is_console(function: ast.expr) -> bool:
    """`console.print` of rich is how the command lines speak; `print` is not."""
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id.endswith("console")
    )


def _is_private_jax(node: ast.Attribute) -> bool:
    inner: ast.expr = node.value
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return (
        isinstance(inner, ast.Name)
        and inner.id in {"jax", "jnp"}
        and _is_private(node.attr)
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
