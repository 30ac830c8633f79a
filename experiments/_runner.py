"""Finding experiments, running one, and writing down what came out."""

import importlib
import pkgutil
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import experiments
from experiments import _report
from experiments._environment import Environment
from experiments._result import Claim, Result, Settings, write_whole

MARKS = {
    "holds": "[green]✓[/green]",
    "does not hold": "[bold red]✗[/bold red]",
    "not judged": "[yellow]–[/yellow]",
}
STYLES = {
    "Proved": "bold green",
    "Proved in part": "bold yellow",
    "FAILED": "bold red",
}


def names() -> list[str]:
    """The names of all experiments."""
    modules = pkgutil.iter_modules(experiments.__path__)
    return sorted(m.name for m in modules if not m.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f"experiments.{name}")


def summary(module: ModuleType) -> str:
    """The question of an experiment: its docstring's first paragraph, on one line."""
    return " ".join((module.__doc__ or "").partition("\n\n")[0].split())


def run(name: str, settings: Settings, folder: Path, console: Console) -> bool:
    """Runs an experiment, prints its claims and writes its files; whether they hold."""
    module = load(name)
    console.print(f"[bold]{name}[/bold]: {summary(module)}")
    start = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        result: Result = module.run(settings, progress)
    seconds = time.perf_counter() - start
    _show(result, console)
    _write(name, result, settings, seconds, folder)
    page = _report.write(folder)
    word = f"[{STYLES[result.word]}]{result.word}[/]"
    told = escape(result.outcome)
    console.print(f"{word} ({seconds:.0f} s): {told} Report: {page}", soft_wrap=True)
    return result.holds


def told(claim: Claim) -> str:
    """The text beside a claim: the measurement, or why it was not judged."""
    if claim.verdict != "not judged":
        return claim.measured
    measured = f"; measured: {claim.measured}" if claim.measured else ""
    return f"not judged: {claim.why_not}{measured}"


def _show(result: Result, console: Console) -> None:
    shown = Table("", "claim", "measured", box=None, pad_edge=False)
    for claim in result.claims:
        shown.add_row(MARKS[claim.verdict], escape(claim.text), escape(told(claim)))
    console.print(shown)
    for note in result.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}")


def _write(
    name: str, result: Result, settings: Settings, seconds: float, folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for picture in result.pictures:
        file = f"{name}-{picture.name}.png"
        picture.figure.savefig(folder / file, dpi=150, bbox_inches="tight")
        plt.close(picture.figure)
        pictures.append({"file": file, "caption": picture.caption})
    evidence = folder / name
    for file, write in result.files.items():
        evidence.mkdir(exist_ok=True)
        write(evidence / file)
    record: dict[str, Any] = {
        "name": name,
        "summary": summary(load(name)),
        "outcome": result.outcome,
        "holds": result.holds,
        "claims": [asdict(c) | {"verdict": c.verdict} for c in result.claims],
        "tables": result.tables,
        "notes": result.notes,
        "pictures": pictures,
        "files": [f"{name}/{file}" for file in result.files],
        "settings": asdict(settings),
        "seconds": seconds,
        "environment": asdict(Environment()),
        "data": result.data,
    }
    # A half-written file would break the report of all others.
    write_whole(folder / f"{name}.json", record)
