"""`python -m benchmarks [NAME ...]`: runs benchmarks, prints tables, writes JSON."""

import argparse
import importlib
import os
import pkgutil
from pathlib import Path

import jax
from rich.console import Console

import benchmarks
from benchmarks import _goals, _harness


def main() -> None:
    """Runs the named benchmarks, or all."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    names = [module.name for module in modules if not module.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the figures beside their goals: benchmarks/recorded.json, and the "
        "table in docs/benchmarks.md",
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    # A second CPU device costs nothing until it is used: both share the threads.
    jax.config.update("jax_num_cpu_devices", 2)
    console = Console()
    for name in options.names or names:
        module = importlib.import_module(f"benchmarks.{name}")
        question = (module.__doc__ or "").splitlines()[0]
        console.print(f"[bold]{name}[/bold]: {question}")
        cases = module.measure()
        console.print(_harness.table(name, cases))
        console.print(f"written to {_harness.write(options.out, name, cases)}\n")
        goals = {case.name: case.goals for case in cases if case.goals}
        if not goals:
            continue
        found, earlier = _goals.run(goals), _goals.recorded().get(name)
        for line in _goals.worse(earlier, found) if earlier else ():
            console.print(f"[red]worse than recorded[/red]: {line}")
        if options.record:
            _goals.record({name: found})


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        Console(stderr=True).print("[red]interrupted[/red]")
        os._exit(130)  # XLA's destructors don't survive a program that still runs.
