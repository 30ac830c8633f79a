"""What the documents show works: their code runs, their links and names exist."""

import builtins
import importlib.util
import json
import re
import symtable
import sys
import types
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import jdist.autograd
import jdist.data_parallel
import jdist.optim
import jdist.pipeline
import jdist.rpc
import jdist.segment
import jdist.verify

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MIGRATION = sorted((ROOT / "docs" / "migration").glob("*.md"))
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
# Their cells run when the site is built.
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


CONTINUES = re.compile(
    r'# continues the (block above|first block(?: of "(?P<heading>.+)")?)\n'
)


class Block(NamedTuple):
    """A block of code on a page."""

    code: str
    continued: tuple[int, ...]
    """The blocks of the page that it continues, in the page's order."""


def blocks_of(page):
    """The blocks of a page, each with those that its first line says it continues."""
    text = page.read_text()
    blocks, headings = [], []
    for place, match in enumerate(CODE.finditer(text)):
        above = re.findall(r"^#+ (.*)$", CODE.sub("", text[: match.start()]), re.M)
        headings.append(above[-1] if above else None)
        before = []
        if said := CONTINUES.match(match[1]):
            name = said["heading"]
            last = place - 1 if said[1] == "block above" else 0
            last = headings.index(name) if name else last
            assert last < place, f"{page.name}: nothing is above {match[1]!r}"
            before = [*blocks[last].continued, last]
        blocks.append(Block(match[1], tuple(before)))
    return blocks


def in_columns(page):
    """The blocks of a page that has torch's code beside ours."""
    codes = CODE.findall(page.read_text())
    columns = [re.match("# (both|torch|jdist)", code)[1] for code in codes]
    return [
        Block(code, tuple(i for i in range(place) if columns[i] in {"both", column}))
        for place, (code, column) in enumerate(zip(codes, columns, strict=True))
    ]


def undefined(code):
    """The names that a program reads and neither it nor Python defines."""
    program = symtable.symtable(code, "block", "exec")
    defined, read = set(dir(builtins)) | {"__name__", "__file__"}, set()
    for name in program.get_symbols():
        if name.is_assigned() or name.is_imported():
            defined.add(name.get_name())
    scopes = [program]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        read |= {
            name.get_name()
            for name in scope.get_symbols()
            if name.is_referenced() and (scope is program or name.is_global())
        }
    return read - defined


@pytest.mark.parametrize(
    "page",
    [*PAGES, *MIGRATION, *TUTORIALS],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_a_block_runs_alone_or_says_which_it_continues(page):
    """Every name is its own, or of a block that it names."""
    if page in TUTORIALS:
        assert "Each cell continues those above it." in page.read_text()
    columns = page in MIGRATION and page.stem != "index"
    if columns:
        rule = "Each block continues the first one and those above it in its column."
        assert rule in page.read_text()
    blocks = in_columns(page) if columns else blocks_of(page)
    for place, (code, continued) in enumerate(blocks):
        program = [blocks[i].code for i in continued]
        missing = undefined("\n".join([*program, code]))
        assert not missing, f"block {place + 1} lacks {sorted(missing)}:\n{code}"


# tests/test_pytest_plugin.py runs the file on pytest.md, by pytest;
# tests/parity/test_ported_models.py the program on ported_models.md, which needs torch.
ELSEWHERE = {"pytest.md", "ported_models.md"}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ELSEWHERE],
    ids=lambda page: page.name,
)
def test_code_runs(page, capsys, monkeypatch, tmp_path):
    """Every Python block, as a user has it: JAX's defaults, what it continues before.

    They are the main program, so that workers can call what it defines, and other
    processes can import it.
    """
    blocks = blocks_of(page)
    programs = {}  # a block that continues none, and all that continue it
    for place, (code, continued) in enumerate(blocks):
        programs.setdefault(next(iter(continued), place), []).append(code)
    missing = []
    for codes in programs.values():
        main = types.ModuleType("__main__")
        main.__file__ = str(tmp_path / "main.py")
        Path(main.__file__).write_text("\n".join(codes))
        monkeypatch.setitem(sys.modules, "__main__", main)
        with (
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            try:
                for code in codes:
                    exec(compile(code, page.name, "exec"), vars(main))
            except jdist.Unavailable as error:
                missing.append(str(error))
    shown = capsys.readouterr().out
    if page.name == "README.md":
        assert "oracle pinned" in shown
        assert "FAILS" not in shown
    if page.name == "verify.md":
        # Both layers are wrong by as much: rounding decides which is worse.
        assert re.search("gradient, (in|out)ward/kernel/value, examples 0-9: ", shown)
        assert "examples 0-5 count 0.8333 times; examples 6-9 count 1.25 times" in shown
        assert "wrong if micro=3 and mask=True: gradient, (root): " in shown
    if missing:
        pytest.skip("; ".join(missing))


def test_the_recipes_for_logging_run(monkeypatch):
    """With stand-ins for the services, which get every tenth step's numbers."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    first, *_ = CODE.findall(text)
    services = re.findall(r"```\{code-block\} python\n(.*?)```", text, re.DOTALL)[:2]
    told = []

    class Writer:
        def __init__(self, folder):
            self.add_scalar = lambda *given: told.append(given)

        def close(self):
            told.append("closed")

    class Run:
        def log(self, numbers, step):
            told.extend((name, number, step) for name, number in numbers.items())

        def finish(self):
            told.append("closed")

    board = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: Run())
    )
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for service in services:
            names = {}
            told.clear()
            exec(first, names)
            exec(service, names)
            steps = [(name, step) for name, _, step in told[:-1]]
            assert steps == [(n, t) for t in (10, 20) for n in ("loss", "grad_norm")]
            assert all(type(number) is float for _, number, _ in told[:-1])
            assert told[-1] == "closed"
            assert [t for _, t in names["shown"]] == [10, 20]


def test_the_site_begins_with_a_program_and_shows_what_it_prints(capsys):
    page = (ROOT / "docs" / "index.md").read_text()
    printed = re.search(r"```\n(candidate .*?)```", page, re.DOTALL)[1]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        exec(CODE.findall(page)[0], {})
    shown = capsys.readouterr().out
    # Bits, and with them the order, differ from machine to machine; rows do not.
    rows = [
        sorted(x.split()[:6] for x in text.splitlines()) for text in (printed, shown)
    ]
    assert all(row in rows[1] for row in rows[0])
    assert "FAILS" not in shown


def test_the_readme_needs_twelve_lines():
    """Imports aside; what a newcomer reads first is short."""
    block, *_ = CODE.findall((ROOT / "README.md").read_text())
    lines = [line for line in block.splitlines() if line.strip()]
    assert len([line for line in lines if "import" not in line]) <= 12


def counts(section, columns, rows=""):
    """Pairs of a table on docs/verify.md: the sums of `n of m` in its columns."""
    page = (ROOT / "docs" / "verify.md").read_text().split(section)[1]
    lines = [line for line in page.splitlines() if re.match(rf"\| ({rows})", line)]
    cells = [line.split("|")[column] for line in lines for column in columns]
    found = [re.match(r" (\d+) of (\d+)", cell).groups() for cell in cells]
    return tuple(sum(map(int, numbers)) for numbers in zip(*found, strict=True))


def times_of_torch(benchmark, what):
    """The range of recorded ratios to torch, beside the clock."""
    runs = json.loads((ROOT / "benchmarks" / "recorded.json").read_text())
    found = [
        goal["figure"]["median"]
        for case in runs[benchmark]["cases"]
        for goal in case["goals"]
        if goal["what"] == what and "processor" not in case["name"]
    ]
    return f"{min(found):.2f} to {max(found):.2f} of its time"


def test_the_figures_of_the_readme_are_those_of_their_pages():
    text = (ROOT / "README.md").read_text()
    found = counts("## What it finds", (2, 3), "0.001|0.01|0.05|0.3|above")
    alarms = counts("## What it finds", (2, 3, 4), "false alarms")
    page = (ROOT / "docs" / "verify.md").read_text()
    table = page.split("### Whether the place is right")[1].split("The effect is")[0]
    rows = [
        line.split("|") for line in table.splitlines() if re.match(r"\| .*\d", line)
    ]
    planted, placed = (
        sum(int(row[i]) for row in rows for i in columns if row[i].strip().isdigit())
        for columns in ((2, 6), (5, 9))
    )
    assert f"| {found[0]} of {found[1]} in float32 and float64 |" in text
    assert f"| {alarms[0]} of {alarms[1]}, bfloat16 included |" in text
    assert f"| {placed} of {planted} random defects in a transformer |" in text
    for benchmark, what in (
        ("ddp", "of torch as shipped"),
        ("autograd", "of torch's time"),
    ):
        assert f"| {times_of_torch(benchmark, what)} on CPU |" in text


def test_a_loop_is_traced_with_fewer_than_ten_lines():
    """Those that the page numbers from 1; all others are the loop's own."""
    page = (ROOT / "docs" / "verify.md").read_text()
    block, *_ = CODE.findall(page.partition("## Where it goes wrong first")[2])
    lines = block.splitlines()
    added = [line for line in lines if re.search(r"# \d$", line)]
    assert [int(line[-1]) for line in added] == list(range(1, len(added) + 1))
    assert not any(re.search("verify|trace", x) for x in lines if x not in added)


@pytest.mark.parametrize(
    "page",
    [*PAGES, *MIGRATION, *TUTORIALS, *DESIGN],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_somewhere(page):
    """Relative links, to files that exist."""
    text = CODE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_table_of_names_is_true():
    """Every jdist name beside a torch name exists, and stands in the guide's code."""
    text = (ROOT / "docs" / "migration" / "index.md").read_text()
    table = text.partition("| torch | jdist |")[2].partition("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.count("|") == 3]
    names = [name for row in rows for name in re.findall(r"`((?:\w+\.)+\w+)", row)]
    assert len(names) >= 40
    shown = "".join(
        code for page in MIGRATION for code in CODE.findall(page.read_text())
    )
    for name in names:
        found = jdist
        for part in name.split("."):
            found = getattr(found, part)
        word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
        # Processes are started from the command line, or by a program in launch.md.
        assert word.search(shown) or name == "rpc.spawn", name


def test_the_reference_has_a_page_for_every_part():
    """Each face once; the build of the site checks every name of each."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    shown = [
        face
        for page in pages
        for face in re.findall(r"automodule:: (\S+)", page.read_text())
    ]
    parts = {
        f"jdist.{name}" for name in dir(jdist) if name.islower() and name[0] != "_"
    }
    assert len(shown) == len(set(shown))
    assert set(shown) == parts | {
        "jdist", "jdist.data_parallel.hooks", "jdist.verify.defects",
    }  # fmt: skip


def test_make_targets_are_documented():
    """Each command of the README's table is a target, and the other way round."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):.*##", makefile, re.MULTILINE))
    shown = set(re.findall(r"`make ([a-z]+)`", (ROOT / "README.md").read_text()))
    assert shown <= targets
    assert targets - shown == {"help", "clean"}


REFUSED = {
    "optim": lambda: jdist.optim.clip_by_global_norm(jax.numpy.ones(2), -1.0),
    "data_parallel": lambda: jdist.data_parallel.shard_batch(
        jax.numpy.ones(4), replicas=2, sizes=(5, 3)
    ),
    "pipeline": lambda: jdist.pipeline.gpipe(0, 4),
    "rpc": lambda: jdist.rpc.rpc_sync("nobody", max, args=(1, 2)),
}


def of_the_site(name):
    """A module beside the pages, which the site's build uses."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def index():
    """The module that makes the site's list of messages from the sources."""
    return of_the_site("messages")


def test_every_public_name_has_a_job_and_a_guide():
    """Its docstring says the job in a sentence, and a page of the guides tells it."""
    faces = ["jdist.data_parallel.hooks", "jdist.verify.defects"]
    faces += [f"jdist.{name}" for name in jdist._PARTS]
    listed = list(of_the_site("public_names").public_names(ROOT / "docs", faces))
    assert len(listed) > 200
    assert [each for each in listed if not each.job] == []
    assert [f"{each.part}.{each.name}" for each in listed if not each.guide] == []


BRANCHED = """
def f(x, kinds):
    if kinds:
        text = "first of all"
        raise TypeError(text)
    text = "there is nothing here"
    rule = "must be a number"
    if x > 1:
        rule += f", not {x}"
    remedy = "Use 3." if x else "Use 4."
    for kind in kinds:
        if kind == x:
            raise ValueError(text + requirement("f(x)", rule, x, remedy))

def said(name):
    return f"{name} has gone" * bool(name)

def requirement(call, rule, got, remedy):
    return call

def g():
    raise RuntimeError(said("it"))
"""


def test_the_index_of_messages_has_every_form_of_a_message(index, tmp_path):
    """Conditions, additions, functions that word it; what is raised before is apart."""
    (tmp_path / "module.py").write_text(BRANCHED)
    listed = {(each.error, each.text) for each in index.messages(tmp_path, set())}
    head, got = "there is nothing here`f(x)` must be a number", "Got …."
    assert listed == {
        ("TypeError", "first of all"),
        ("RuntimeError", "… has gone"),
        *(
            ("ValueError", f"{head}{more}. {got} {remedy}")
            for more in ("", ", not …")
            for remedy in ("Use 3.", "Use 4.")
        ),
    }


def test_the_index_of_messages_has_what_is_raised(index):
    """The site's list finds errors of several parts."""
    listed = list(index.messages(ROOT / "jdist", {"RpcError"}))
    for part, call in REFUSED.items():
        with pytest.raises((ValueError, jdist.JdistError), match=r"\w") as raised:
            call()
        name, words = raised.type.__name__, " ".join(str(raised.value).split())
        own = [each for each in listed if (each.part, each.error) == (part, name)]
        assert any(re.fullmatch(each.pattern(), words) for each in own), words
