"""Reads the sources and lists every departure from the house in docs/architecture.md.

Only the syntax tree is read: nothing is imported, so the check takes milliseconds and
sees files that would not import.
"""

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

GROUND = {
    "_compilation_cache", "_errors", "_tree", "_lru_cache", "_flax", "_own_code",
    "_scheduling", "_compat", "_agreement",
}  # fmt: skip
NOTHING: set[str] = set()
MAY_IMPORT = {
    **dict.fromkeys(GROUND, NOTHING),
    "_agreement": {"_compat", "_errors"},
    "_compat": {"_errors"},
    "_flax": {"_compat", "_errors", "_tree"},
    "_own_code": {"_errors"},
    **dict.fromkeys(
        ("segment", "reduction", "optim", "verify", "rpc", "targets"), GROUND
    ),
    "_checkpoint": GROUND,
    "_fit": GROUND | {"_checkpoint", "reduction"},
    "data_parallel": GROUND
    | {"_checkpoint", "_fit", "rpc", "reduction", "optim", "segment"},
    "autograd": GROUND | {"_checkpoint", "rpc", "segment", "reduction", "optim"},
    "pipeline": GROUND
    | {"_checkpoint", "_fit", "rpc", "segment", "reduction", "optim", "targets"},
    "launch": GROUND | {"rpc"},
    "ray": GROUND | {"rpc"},
    "matrix": GROUND
    | {"autograd", "data_parallel", "optim", "pipeline", "reduction", "rpc", "segment"},
    "pytest_plugin": GROUND | {"verify"},
    "__init__": GROUND,
    "__main__": GROUND,
}

FACES = {
    "segment": {"internal"},
    "optim": {"internal"},
    "rpc": {"extension"},
    "data_parallel": {"hooks"},
}
"""Modules of a part that others may import, beside the part itself."""

ROOMS = {
    "segment": ("_programs _lookup", "_residuals", "_segment", "internal"),
    "optim": (
        "_hyperparameters _loss_scale _whole_arrays",
        "_optimizer",
        "registry",
        "algorithms clipping labels master_weights optax_bridge",
        "internal ema",
    ),
    "verify": (
        "bound",
        "defects draws parts progress report",
        "evaluation mutation_score processes",
        "explanations oracle candidates",
        "comparison",
        "arguments measure",
        "gradient_check",
        "problem tracing",
        "steps",
        "fuzzing matrix",
        "__main__",
    ),
    "rpc": (
        "base",
        "codec",
        "wire",
        "calls",
        "group rref",
        "modules processes",
        "extension",
    ),
    "autograd": (
        "recording",
        "contexts",
        "rpc_hooks engine nnx_module call_primitive",
        "optimizer picture",
        "install",
    ),
    "data_parallel": (
        "replicas",
        "hooks",
        "gradient",
        "step",
        "data",
        "elasticity",
    ),
    "pipeline": (
        "schedule",
        "schedules",
        "simulation",
        "plan synthesis",
        "stages",
        "run",
        "weight_stashing spmd",
        "places",
        "pipeline",
        "measured_timeline checkpoint",
        "training_loop",
    ),
    "launch": ("options", "relay", "__main__"),
    "ray": ("worker_actor", "placement"),
    "targets": (
        "chips hlo",
        "arithmetic collectives compilers trip_count",
        "hardware roofline",
        "report",
        "compilation",
        "job",
        "search",
        "__main__",
    ),
}
"""Rooms of each part, from the bottom up; those of one line are strangers."""

FOLDER_MODULES = 15

FUNCTION_LINES = 60
FORBIDDEN_CALLS = {"print": "printing", "sleep": "sleeping", "breakpoint": "breakpoint"}


def violations(root: Path) -> list[str]:
    """Every departure under `root`, as `file:line: what is wrong`."""
    found = []
    trees: dict[str, ast.Module] = {}
    for folder in ("jdist", "experiments", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            trees[name] = ast.parse(path.read_text(), name)
    for name, tree in trees.items():
        found += [f"{name}:{line}: {what}" for line, what in _in_file(name, tree)]
    library = {n: tree for n, tree in trees.items() if n.startswith("jdist/")}
    found += [f"{name}: {what}" for name, what in _in_library(library)]
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


def _in_library(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Departures that no file shows by itself."""
    graph = {name: _imported(name, tree, trees) for name, tree in trees.items()}
    for name, imported in graph.items():
        for other in sorted(imported):
            yield from ((name, what) for what in _between(name, other))
    if circle := _circle(graph):
        yield circle[0], f"a circle of imports: {' <- '.join(circle)}"
    for name, tree in trees.items():
        yield from ((name, what) for what in _face(name, tree))
        yield from ((name, what) for what in _hidden_modules(name, tree, trees))
    yield from _class_names(trees)
    folders: dict[str, list[str]] = defaultdict(list)
    for name in trees:
        if not name.endswith("/__init__.py"):
            folders[name.rpartition("/")[0]].append(name)
    for folder, modules in folders.items():
        if len(modules) > FOLDER_MODULES:
            yield folder, f"{len(modules)} modules in one folder"


def _imported(name: str, tree: ast.Module, trees: Mapping[str, ast.Module]) -> set[str]:
    """The files of the library that one imports, for types and in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module, imported in _modules(node):
                whole, inside = (
                    [f"{path}/__init__.py", f"{path}.py"]
                    for path in (
                        module.replace(".", "/"),
                        f"{module}.{imported}".strip(".").replace(".", "/"),
                    )
                )
                found.update([x for x in (*inside, *whole) if x in trees][:1])
    # `jdist` itself imports nothing but its exceptions.
    return found - {name, "jdist/__init__.py"}


def _between(name: str, other: str) -> Iterator[str]:
    """Whether one file may import another: by the other's face, and downwards."""
    part, others_part = _part(name), _part(other)
    below = other.removeprefix(f"jdist/{others_part}").strip("/").removesuffix(".py")
    room = below.partition("/")[0]
    if part != others_part:
        faces = {"__init__", *FACES.get(others_part, ())}
        is_face = below in {"", *faces} or below.removesuffix("/__init__") in faces
        if not is_face:
            yield f"imports {other}, which is no face of {others_part}"
        return
    own = name.removeprefix(f"jdist/{part}/").partition("/")[0].removesuffix(".py")
    levels = {
        each: level
        for level, rooms in enumerate(ROOMS.get(part, ()))
        for each in rooms.split()
    }
    if not levels or own in {room, "__init__"}:
        return
    for each in (own, room):
        if each not in levels:
            yield f"{each} is no room that ROOMS draws in {part}"
            return
    if levels[room] >= levels[own]:
        yield f"{own} imports {room}, which is not below it"


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Files that import each other in a circle, from one to itself; none without."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _face(name: str, tree: ast.Module) -> Iterator[str]:
    """What others may import says what it offers; the ground floor by its imports."""
    part, file = _part(name), Path(name).stem
    if part in GROUND:
        return
    is_face = file == "__init__" or file in FACES.get(part, set())
    if is_face and _exported(tree) is NOTHING:
        yield "has no `__all__`"


def _hidden_modules(
    name: str, tree: ast.Module, trees: Mapping[str, ast.Module]
) -> Iterator[str]:
    """Modules of a package that share their name with something that it exports.

    `import a.b.c as d` binds the attribute `c` of `a.b`, so that it would find the
    function and never the module.
    """
    folder, _, file = name.rpartition("/")
    if file != "__init__.py":
        return
    package = folder.replace("/", ".")
    modules = {
        imported or module.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module, imported in _modules(node)
        if module == package or (not imported and module.startswith(f"{package}."))
    }
    for each in sorted(_exported(tree) - modules):
        if {f"{folder}/{each}.py", f"{folder}/{each}/__init__.py"} & trees.keys():
            yield f"exports {each}, which hides its module of that name"


def _exported(tree: ast.Module) -> set[str]:
    """The names in a module's `__all__`; NOTHING itself if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(x, ast.Name) and x.id == "__all__" for x in targets):
                strings = (
                    x for x in ast.walk(node.value) if isinstance(x, ast.Constant)
                )
                return {str(x.value) for x in strings}
    return NOTHING


def _class_names(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """One name, one thing."""
    known: dict[str, str] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                first = known.setdefault(node.name, name)
                if first != name:
                    yield name, f"class {node.name} is in {first} too"


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
