"""`python -m experiments.strangers.layouts NAME`: one trainer's search, printed."""

import argparse
import importlib
import logging
from importlib import metadata

import jax
from rich.console import Console

from jdist import verify

NAMES = ("easydel", "maxtext", "tunix")


def main() -> None:
    """Judges the layouts of a trainer, and prints the report."""
    parser = argparse.ArgumentParser("python -m experiments.strangers.layouts")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--seconds", type=float, help="of random layouts, from the start"
    )
    parser.add_argument(
        "--first", nargs="*", default=[], help="axes that keep their first values"
    )
    given = parser.parse_args()
    logging.basicConfig()
    logging.getLogger("jdist.verify").setLevel(logging.INFO)
    own = importlib.import_module(f"experiments.strangers.layouts.{given.name}")
    jax.config.update("jax_num_cpu_devices", own.DEVICES)
    # A fault that is known hides others that look like it.
    axes = {a: v[:1] if a in given.first else v for a, v in own.AXES.items()}
    found = verify.fuzz(
        own.problem,
        own.claim,
        own.trainer,
        axes=axes,
        model=own.MODEL,
        valid=getattr(own, "valid", None),
        seconds=given.seconds,
    )
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", *own.PACKAGES)]
    Console().print(", ".join(versions), found, sep="\n")


if __name__ == "__main__":
    main()
