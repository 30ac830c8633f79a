"""An exhibit: a published bug as a program in two forms, and the place to be named.

Each module of an exhibit has a docstring, of which the first line is the title and the
rest says what the published bug was, and these names:

- `THREAD`: the address at which it was published.
- `CLAIM`: a sentence on what the trainer is said to compute.
- `EXPECTED`: strings for the place and for what is wrong there, written before the
  judge is asked. They name the place if all of them stand in one line of its report.
- `trainer(part)`: the trainer, with `buggy` or `fixed` as the part that differs.
- `judge()`: the judge of a trainer, as a user writes it, below the line `SECTION`; made
  once for both forms.
- `KNOWN`, optional: what is known of an exhibit beyond its two forms.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

from experiments.museum.meshes import Trainer
from experiments.strangers.stranger import SECTION, code_lines

KINDS = (
    "pipelines", "accumulation", "replicas", "sequences", "experts", "clipping",
    "optimizers", "randomness", "objectives", "torch_trainers", "processes",
)  # fmt: skip
"""The folders of exhibits, in the order of the table."""

NEEDS = {"torch_trainers": "torch"}
"""The package that all exhibits of a folder need."""


@dataclass(frozen=True)
class Exhibit:
    """One published bug.

    Attributes:
      kind: The folder of its module.
      name: The module's own name.
      title: What goes wrong, in a line.
      story: What the published bug was.
      thread: The address of the thread.
      claim: What the trainer is said to compute.
      expected: The strings that name the place, in one line of the report.
      known: What is known beyond the two forms.
      module: The module.
    """

    kind: str
    name: str
    title: str
    story: str
    thread: str
    claim: str
    expected: tuple[str, ...]
    known: str
    module: ModuleType

    @property
    def label(self) -> str:
        """The folder and the name."""
        return f"{self.kind}/{self.name}"

    def trainer(self, fixed: bool) -> Trainer:
        """The trainer in its buggy or its fixed form."""
        return self.module.trainer(self.module.fixed if fixed else self.module.buggy)

    @property
    def glue(self) -> int:
        """The number of code lines that serve the judge; shared ones count as well."""
        shared = [x for x in vars(self.module).values() if isinstance(x, ModuleType)]
        own = [x for x in shared if x.__name__.startswith(__package__)]
        sections = (inspect.getsource(x).partition(SECTION)[2] for x in own)
        used = sections if self.module.judge.__module__ != self.module.__name__ else ()
        mine = inspect.getsource(self.module).partition(SECTION)[2]
        return sum(len(code_lines(section)) for section in (mine, *used))

    @property
    def trainer_source(self) -> str:
        """The source of what stands between the fixed part and the judge."""
        before = inspect.getsource(self.module).partition(SECTION)[0]
        return before.partition(self.source("fixed"))[2].strip()

    def source(self, name: str) -> str:
        """The source of one of its functions."""
        return inspect.getsource(getattr(self.module, name)).rstrip()


def names() -> list[str]:
    """The labels of all exhibits, in the order of the table."""
    found = []
    for kind in KINDS:
        room = importlib.import_module(f"experiments.museum.{kind}")
        modules = pkgutil.iter_modules(room.__path__)
        names = sorted(m.name for m in modules if not m.name.startswith("_"))
        found += [f"{kind}/{name}" for name in names]
    return found


def missing(label: str) -> str:
    """The package that an exhibit lacks; empty if it can be shown."""
    needed = NEEDS.get(label.partition("/")[0], "")
    return needed if needed and find_spec(needed) is None else ""


def load(label: str) -> Exhibit:
    """The exhibit with a label.

    Args:
      label: Its folder and name, such as "clipping/first_rank".
    """
    kind, name = label.split("/")
    module = importlib.import_module(f"experiments.museum.{kind}.{name}")
    title, _, story = inspect.cleandoc(module.__doc__ or "").partition("\n\n")
    return Exhibit(
        kind, name, " ".join(title.split()).rstrip("."), story.strip(), module.THREAD,
        module.CLAIM, module.EXPECTED, getattr(module, "KNOWN", ""), module,
    )  # fmt: skip


def names_the_place(expected: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether one line of a report has all strings of the expected place."""
    return any(all(each in line for each in expected) for line in lines)
