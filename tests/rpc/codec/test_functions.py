"""Which names a worker answers: what is allowed, and everything that is not."""

import ast
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jdist
import jdist.optim
from jdist.rpc.base.errors import ForbiddenFunction
from jdist.rpc.codec.functions import FunctionTable
from tests.rpc import nameable

HERE = "tests.rpc.nameable"


@pytest.fixture
def table():
    nameable.CALLS.clear()
    return FunctionTable(allow=["tests"])


# --- what is allowed ---


@pytest.mark.parametrize(
    ("ref", "thing"),
    [
        ("jax.numpy:add", jnp.add),
        ("jax.numpy:absolute", jnp.absolute),
        ("jax.numpy.linalg:norm", jnp.linalg.norm),
        ("builtins:min", min),
        ("builtins:ValueError", ValueError),
        ("jax.errors:JaxRuntimeError", jax.errors.JaxRuntimeError),
        ("jdist.optim.algorithms.sgd:sgd", jdist.optim.sgd),
    ],
)
def test_what_everybody_may_name(ref, thing):
    """Without any allow-list, in both directions."""
    table = FunctionTable()
    assert table.resolve(ref) is thing
    assert table.resolve(table.reference(thing)) is thing


def test_the_whole_of_jax_numpy_is_known():
    """Every function there that JAX itself defines, whatever it calls itself."""
    table = FunctionTable()
    known = 0
    for name, thing in vars(jnp).items():
        home = getattr(thing, "__module__", None) or ""
        if name.startswith("_") or not callable(thing) or name in NOT_PURE:
            continue
        if home.split(".")[0] == "jax":
            assert table.resolve(table.reference(thing)) is thing
            known += 1
    assert known > 300


NOT_PURE = ["load", "save", "savez", "set_printoptions", "printoptions"]


@pytest.mark.parametrize("name", NOT_PURE)
def test_what_jax_numpy_has_beside_computing(name):
    """Nothing that reads or writes files, or settings of the process."""
    with pytest.raises(ForbiddenFunction, match="may name"):
        FunctionTable().resolve(f"jax.numpy:{name}")


def test_other_modules_of_jax_by_name():
    """JAX hides where its functions live: their public module's name opens them."""
    with pytest.raises(ForbiddenFunction, match="may name"):
        FunctionTable().reference(jax.lax.add)
    allow = ["jax.scipy.special", "jax.lax"]
    table = FunctionTable(allow)
    for function in (jax.scipy.special.erf, jax.lax.add):
        ref = table.reference(function)
        assert ref.startswith(("jax.scipy.special:", "jax.lax:"))
        assert FunctionTable(allow).resolve(ref) is function


def test_activations_need_no_permission():
    """What `jax.nn` computes may be named as what `jax.numpy` does, and no more."""
    table = FunctionTable()
    for function in (jax.nn.relu, jax.nn.softmax, jax.nn.one_hot):
        ref = table.reference(function)
        assert ref == f"jax.nn:{function.__name__}"
        assert table.resolve(ref) is function
    assert table.reference(jnp.tanh) == "jax.numpy:tanh"
    for hidden in ("initializers", "initializers.zeros", "os"):
        with pytest.raises(ForbiddenFunction, match="may name"):
            table.resolve(f"jax.nn:{hidden}")


def test_single_objects():
    """One function of a module, and not its neighbour."""
    table = FunctionTable(allow=[f"{HERE}:add", f"{HERE}:Point.dimension"])
    assert table.reference(nameable.add) == f"{HERE}:add"
    assert table.resolve(f"{HERE}:Point.dimension") is nameable.Point.dimension
    for name in ("wrapped", "Point", "addition", "Point.shifted"):
        with pytest.raises(ForbiddenFunction, match="may name"):
            table.resolve(f"{HERE}:{name}")


def test_one_name_given_as_a_text():
    """`allow="mypkg"` does not mean its letters."""
    assert FunctionTable(allow="tests").resolve(f"{HERE}:add") is nameable.add


def test_a_prefix_is_not_a_parent():
    """`test` does not open `tests`."""
    with pytest.raises(ForbiddenFunction, match="may name"):
        FunctionTable(allow=["test", "tests.rp"]).resolve(f"{HERE}:add")


def test_a_module_not_imported_yet(tmp_path, monkeypatch):
    """An allowed module is imported when it is first named; others never are."""
    for name in ("allowed_late", "strange"):
        code = f"import sys\nsys.{name} = True\ndef f():\n    return 1\n"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(sys, name, False, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "allowed_late", raising=False)
    table = FunctionTable(allow=["allowed_late"])
    assert table.resolve("allowed_late:f")() == 1
    assert sys.allowed_late
    with pytest.raises(ForbiddenFunction, match="may name"):
        table.resolve("strange:f")
    assert not sys.strange
    del sys.modules["allowed_late"]


def test_a_module_that_fails_to_import(tmp_path, monkeypatch):
    """Its error is told, whatever it is."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no good')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ForbiddenFunction, match=r"does not serialize.*no good"):
        FunctionTable(allow=["broken_module"]).resolve("broken_module:f")


# --- the main program ---


def _main(package=None):
    main = types.ModuleType("__main__")
    main.__package__ = package
    source = "def f():\n    return 5\nclass C:\n    def m(self):\n        return 6\n"
    exec(source, main.__dict__)
    return main


def test_the_main_program():
    """Its functions go by `__main__`, and are the receiver's own."""
    sender, receiver = _main(), _main()
    ref = FunctionTable(main=sender).reference(sender.f)
    assert ref == "__main__:f"
    assert FunctionTable(main=receiver).resolve(ref) is receiver.f


def test_the_main_program_of_a_spawned_process():
    """multiprocessing calls it `__mp_main__`; on the wire it is `__main__` still."""
    spawned = _main()
    spawned.f.__module__ = spawned.C.__module__ = "__mp_main__"
    table = FunctionTable(main=spawned)
    assert table.reference(spawned.f) == "__main__:f"
    assert table.resolve("__main__:f") is spawned.f
    assert table.method(spawned.C(), "m")() == 6


def test_the_package_of_the_main_program():
    """`python -m tests.rpc.something` opens `tests`, and a plain script nothing."""
    table = FunctionTable(main=_main("tests.rpc"))
    assert table.resolve(f"{HERE}:add") is nameable.add
    for package in (None, "", "other"):
        with pytest.raises(ForbiddenFunction, match="may name"):
            FunctionTable(main=_main(package)).resolve(f"{HERE}:add")


@pytest.mark.parametrize("package", ["os", "multiprocessing", "importlib"])
def test_a_main_program_of_the_standard_library(package):
    """What is never allowed stays so when Python itself is the program."""
    with pytest.raises(ForbiddenFunction, match="may name"):
        FunctionTable(main=_main(package)).resolve(f"{package}:system")


def test_real_main_programs(tmp_path):
    """A script, and a module run with -m, name their own functions and package."""
    script = textwrap.dedent("""
        from jdist.rpc.codec.functions import FunctionTable
        from package_of_main.helper import helper
        def own(): pass
        for function in (own, helper):
            try:
                print(FunctionTable().reference(function))
            except Exception as error:
                print(type(error).__name__)
    """)
    package = tmp_path / "package_of_main"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("def helper(): pass\n")
    (package / "program.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    for command, last in (
        (["-m", "package_of_main.program"], "package_of_main.helper:helper"),
        ([str(package / "program.py")], "ForbiddenFunction"),
    ):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True,
            text=True, check=True, timeout=120,
        )  # fmt: skip
        assert done.stdout.split() == ["__main__:own", last]


# --- what is not ---

HOSTILE = {
    # Modules that are not allowed, under their own and their inner names.
    "os": "os:system", "posix": "posix:system", "nt": "nt:system",
    "eval": "builtins:eval", "exec": "builtins:exec", "getattr": "builtins:getattr",
    "import": "builtins:__import__", "open": "builtins:open",
    "compile": "builtins:compile", "type": "builtins:type",
    "object": "builtins:object", "map": "builtins:map", "super": "builtins:super",
    "exit": "builtins:SystemExit", "interrupt": "builtins:KeyboardInterrupt",
    "subprocess": "subprocess:Popen", "run": "subprocess:run",
    "importlib": "importlib:import_module", "reload": "importlib:reload",
    "runpy": "runpy:run_path", "pickle": "pickle:loads", "ctypes": "ctypes:CDLL",
    "shutil": "shutil:rmtree", "sys": "sys:exit", "numpy": "numpy:load",
    "threading": "threading:Thread", "jax": "jax:config", "attrgetter":
    "operator:attrgetter", "nested module": "os.path:join", "mp": "multiprocessing:x",
    # Through an allowed module.
    "imported function": f"{HERE}:imported_function", "imported class": f"{HERE}:Popen",
    "module": f"{HERE}:module", "through a module": f"{HERE}:module.Popen",
    "through two": f"{HERE}:module.os.system", "by its name": f"{HERE}:subprocess.run",
    "alias": f"{HERE}:alias_of_add", "instance": f"{HERE}:instance",
    "through an instance": f"{HERE}:instance.shell", "constant": f"{HERE}:constant",
    "method of constant": f"{HERE}:constant.get", "partial": f"{HERE}:three_more",
    "through a partial": f"{HERE}:three_more.func", "lambda": f"{HERE}:double",
    "lambda by name": f"{HERE}:<lambda>", "closure": f"{HERE}:outer.<locals>.inner",
    "attribute of a function": f"{HERE}:add.attribute",
    "attribute of a class": f"{HERE}:Counter.shell",
    "class in a class": f"{HERE}:Counter.process",
    "module in a class": f"{HERE}:Counter.library",
    "through a module in a class": f"{HERE}:Counter.library.run",
    "class method": f"{HERE}:Counter.make", "property": f"{HERE}:Counter.danger",
    "property of the metaclass": f"{HERE}:WithMeta.danger",
    "method of the metaclass": f"{HERE}:WithMeta.method_of_the_class",
    "wrapped by another": f"{HERE}:wrapped.function",
    "private method": f"{HERE}:Counter._secret", "and static": f"{HERE}:Counter._aside",
    "and of a private class": f"{HERE}:Counter._Inner._aside",
    "lazy attribute": f"{HERE}:lazy_name",
    # Inwards.
    "globals": f"{HERE}:add.__globals__", "wrapped": f"{HERE}:wrapped.__wrapped__",
    "code": f"{HERE}:add.__code__", "class of": f"{HERE}:Point.__class__",
    "bases": f"{HERE}:Point.__base__", "subclasses": f"{HERE}:Point.__subclasses__",
    "mro": f"{HERE}:Point.mro", "init": f"{HERE}:Counter.__init__",
    "reduce": f"{HERE}:Point.__reduce_ex__", "builtins of": f"{HERE}:__builtins__",
    "dictionary": f"{HERE}:__dict__", "loader": f"{HERE}:__loader__",
    "jnp inwards": "jax.numpy:add.__class__", "jnp method": "jax.numpy:add.reduce",
    "min inwards": "builtins:min.__self__", "dict inwards": "builtins:dict.fromkeys",
    # Parts of jdist that steer the process.
    "launch": "jdist.launch:main", "spawn": "jdist.rpc.processes.spawn:spawn",
    "rpc": "jdist.rpc:shutdown",
    "settings": "jdist.rpc.processes.process_settings:apply",
    "verify": "jdist.verify.__main__:main", "compat": "jdist._compat:trace",
    "cpu devices": "jdist._compat:set_cpu_device_count",
    "replicas of processes": "jdist.matrix.processes:serve",
    "jdist's import": "jdist.optim.algorithms.sgd:requirement",
    "through jdist": "jdist:optim.jax",
    "errors' import": "jdist.rpc.base.errors:JdistError",
    # Nothing.
    "absent": f"{HERE}:absent", "absent in class": f"{HERE}:Point.absent",
    "absent module": "tests.rpc.absent:f", "main of a package": "tests.__main__:main",
    "no colon": "tests.rpc.nameable.add", "empty": "", "only a colon": ":",
    "no name": f"{HERE}:", "no module": ":add", "dots": f"{HERE}:..add",
    "two colons": f"{HERE}:add:add", "slashes": "tests/rpc/nameable:add",
    "relative": "tests..rpc.nameable:add", "null": "tests.\0:f", "space": " tests:f",
    "path": "tests.rpc.nameable:add ", "case": "TESTS.rpc.nameable:add",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(table, name):
    """Refused, each with words that name it; and nothing runs on the way."""
    ref = HOSTILE[name]
    loaded = set(sys.modules)
    with pytest.raises(ForbiddenFunction, match=r"`rpc\(function\)` must"):
        table.resolve(ref)
    assert nameable.CALLS == []
    assert set(sys.modules) == loaded


FILES = {
    "open", "Path", "Popen", "import_module", "makedirs", "memmap", "mkdir", "mkstemp",
    "read_bytes", "read_text", "rename", "rmdir", "rmtree", "run_path",
    "savefig", "symlink", "system", "touch", "unlink", "write_bytes", "write_text",
    "StepFolder",
}  # fmt: skip
"""Calls by which code gets at files, other programs and modules; jdist's own, too."""

HARMLESS = {
    "jdist._errors:extra",  # Looks where jdist itself is installed.
    "jdist._checkpoint:_orbax",  # Imports one package, the same always.
}
"""Of those that use such calls: nothing there is the caller's choice."""


def _those_that_call(names):
    """All functions of jdist that do, by the names under which others could ask."""
    root = Path(jdist.__file__).parent
    for file in sorted(root.rglob("*.py")):
        parts = ("jdist", *file.relative_to(root).with_suffix("").parts)
        module = ".".join(parts).removesuffix(".__init__")
        yield from _functions(ast.parse(file.read_text()), f"{module}:", names)


def _functions(node, prefix, names):
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef):
            yield from _functions(inner, f"{prefix}{inner.name}.", names)
        elif isinstance(inner, ast.FunctionDef):
            calls = [n.func for n in ast.walk(inner) if isinstance(n, ast.Call)]
            called = {call.id for call in calls if isinstance(call, ast.Name)}
            # Much has a method `open`; that of a path is found by `Path`.
            methods = {call.attr for call in calls if isinstance(call, ast.Attribute)}
            if names & (called | (methods - {"open"})):
                yield prefix + inner.name


def test_nobody_reaches_a_file_through_jdist():
    """Not by naming one to a function, nor to an object that keeps it."""
    table = FunctionTable()
    found = sorted(set(_those_that_call(FILES)) - HARMLESS)
    assert "jdist.data_parallel.data.checkpoint:TrainCheckpoints.__init__" in found
    assert "jdist.launch.relay:Relay.__init__" in found
    for ref in found:
        with pytest.raises(ForbiddenFunction, match=r"`rpc\(function\)` must"):
            table.resolve(ref.removesuffix(".__init__"))


def test_what_takes_a_path_cannot_be_named_in_jdist(table):
    """What users allow is theirs to judge."""
    with pytest.raises(ForbiddenFunction, match="must not read or write files that"):
        table.resolve("jdist.data_parallel.data.checkpoint:TrainCheckpoints")
    assert table.resolve(f"{HERE}:read") is nameable.read


def test_a_name_that_the_callee_lacks(table):
    """In the words that torch's users search for."""
    with pytest.raises(
        ForbiddenFunction,
        match=r"RPC pickler does not serialize function code.*both caller and callee",
    ):
        table.resolve(f"{HERE}:only_on_the_caller")


@pytest.mark.parametrize(
    "module",
    ["os", "os.path", "posix", "builtins", "builtins:eval", "subprocess", "importlib",
     "importlib.util", "sys", "ctypes", "pickle", "subprocess:run"],
)  # fmt: skip
def test_never(module):
    """No allow-list opens what can run anything."""
    with pytest.raises(ValueError, match=r"allow=...\)` must not open what can run"):
        FunctionTable(allow=[module])


@pytest.mark.parametrize("allow", [[""], [3], [None], [os]])
def test_allow_takes_names(allow):
    """Not objects, not nothing."""
    with pytest.raises(ValueError, match="must be names such as"):
        FunctionTable(allow=allow)


# --- methods ---

METHODS = [
    "_secret", "_aside", "_make", "_",
    "__init__", "__class__", "__reduce_ex__", "__getattribute__", "danger", "shell",
    "process", "library", "made", "count", "absent", "", "make.x", "Inner",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("of_class", [False, True])
def test_hostile_methods(table, name, of_class):
    """Only methods that the class itself defines, and no descriptor runs."""
    owner = nameable.Counter if of_class else nameable.instance
    with pytest.raises(ForbiddenFunction, match=r"`rpc\(method\)` must be"):
        table.method(owner, name)
    assert nameable.CALLS == []


def test_methods_that_are_allowed(table):
    """Of an object every kind of method, of a class only class methods."""
    point = nameable.Point(1)
    assert table.method(point, "shifted")(2).x == 3
    assert table.method(point, "origin")().x == 0
    assert table.method(point, "dimension")() == 2
    assert table.method(nameable.Point, "origin")().x == 0
    for name in ("shifted", "dimension"):
        with pytest.raises(ForbiddenFunction, match="its class defines"):
            table.method(nameable.Point, name)


def test_private_names_at_the_top_of_a_module_close_nothing(table):
    """torch's own examples name such functions; and a private class is a type."""
    for thing in (nameable._remote_method, nameable._Private, nameable.Counter._Inner):
        assert table.named(table.reference(thing)) is thing
    assert table.method(nameable._Private(), "__call__")() == 7


def test_a_private_member_that_is_allowed_by_its_name():
    """Explicitly, as any single object."""
    name = f"{HERE}:Counter._aside"
    assert FunctionTable(allow=[name]).resolve(name) is nameable.Counter._aside


# --- classes, which are called to be made ---


@pytest.mark.parametrize("kind", nameable.NOT_ITS_OWN, ids=lambda kind: kind.__name__)
def test_constructors_from_modules_not_allowed(table, kind):
    """As methods: what was inherited from others is theirs."""
    ref = f"{HERE}:{kind.__name__}"
    message = (
        rf"must have a constructor from a module .* Got {ref} with __(init|new)__ "
    )
    with pytest.raises(ForbiddenFunction, match=message):
        table.named(ref)
    # As the type of a value, whose constructor does not run, and where it is allowed.
    assert table.resolve(ref) is kind
    assert FunctionTable(allow=[ref]).named(ref) is kind


def test_a_module_that_is_allowed_gives_its_constructors():
    table = FunctionTable(allow=["tests", "argparse"])
    assert table.named(f"{HERE}:Parser") is nameable.Parser


@pytest.mark.parametrize("kind", nameable.ITS_OWN, ids=lambda kind: kind.__name__)
def test_constructors_that_may_be_called(table, kind):
    """Own ones, whatever they inherit; and those that only keep what they are given."""
    assert table.named(table.reference(kind)) is kind


def test_methods_from_modules_not_allowed():
    """The class may be anybody's: the method's own module counts."""
    with pytest.raises(ForbiddenFunction, match=r"nameable:Point.shifted.*allow="):
        FunctionTable().method(nameable.Point(1), "shifted")


def test_an_attribute_does_not_stand_for_a_method(table):
    """What a peer put into an object is not what is called."""
    point = nameable.Point(1)
    point.shifted = os.system
    assert table.method(point, "shifted")(2).x == 3


def test_text_methods(table):
    """Not even harmless ones of built-in types: their code is nobody's module."""
    for owner, name in (("a", "format"), ([], "append"), ({}, "get"), (5, "bit_count")):
        with pytest.raises(ForbiddenFunction, match="its class defines"):
            table.method(owner, name)


# --- what was found before ---


def test_a_name_means_what_it_means_now(table, monkeypatch):
    """What was found once is not answered for ever."""
    first = nameable.add
    assert table.resolve(f"{HERE}:add") is first
    second = types.FunctionType(first.__code__, vars(nameable))
    monkeypatch.setattr(nameable, "add", second)
    assert second.__qualname__ == "add"
    assert table.resolve(f"{HERE}:add") is second
    with pytest.raises(ValueError, match="must still be what its name"):
        table.reference(first)
    monkeypatch.delattr(nameable, "add")
    with pytest.raises(ForbiddenFunction, match="that the callee has"):
        table.resolve(f"{HERE}:add")


def test_a_module_that_was_replaced(table, monkeypatch):
    assert table.resolve(f"{HERE}:add") is nameable.add
    other = types.ModuleType(HERE)
    exec("def add(x, y): return 0", vars(other))
    monkeypatch.setitem(sys.modules, HERE, other)
    assert table.resolve(f"{HERE}:add") is other.add
