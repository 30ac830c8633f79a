"""Finding experiments, running one, and writing down what came out."""

import importlib
import json
import pkgutil
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import experiments
from experiments import _report
from experiments._environment import Environment
from experiments._result import Result, Settings


def names() -> list[str]:
    """All experiments, by name."""
    modules = pkgutil.iter_modules(experiments.__path__)
    return sorted(m.name for m in modules if not m.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f"experiments.{name}")


def summary(module: ModuleType) -> str:
    """The first paragraph of its docstring, on one line."""
    return " ".join((module.__doc__ or "").partition("\n\n")[0].split())


def run(name: str, settings: Settings, folder: Path, console: Console) -> bool:
    """Runs one experiment, shows its claims, writes its files; whether it holds."""
    module = load(name)
    console.print(f"[bold]{name}[/bold]: {summary(module)}")
    start = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        result: Result = module.run(settings, progress)
    seconds = time.perf_counter() - start
    _show(result, console)
    _write(name, result, settings, seconds, folder)
    page = _report.write(folder)
    if result.holds:
        outcome = f"[bold green]Proved[/bold green] in {seconds:.0f} s: {result.proved}"
    else:
        failed = sum(not claim.holds for claim in result.claims)
        outcome = (
            f"[bold red]FAILED[/bold red]: {failed} of {len(result.claims)} claims."
        )
    console.print(f"{outcome} Report: {page}", soft_wrap=True)
    return result.holds


def _show(result: Result, console: Console) -> None:
    shown = Table("", "claim", "measured", box=None, pad_edge=False)
    for claim in result.claims:
        mark = "[green]✓[/green]" if claim.holds else "[bold red]✗[/bold red]"
        shown.add_row(mark, claim.text, claim.measured)
    console.print(shown)
    for note in result.notes:
        console.print(f"[yellow]note:[/yellow] {note}")


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
        "proved": result.proved,
        "holds": result.holds,
        "claims": [asdict(claim) for claim in result.claims],
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
    unfinished = folder / f"{name}.json.unfinished"
    unfinished.write_text(json.dumps(record, indent=1, allow_nan=False))
    unfinished.replace(folder / f"{name}.json")
