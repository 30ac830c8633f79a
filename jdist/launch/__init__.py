"""`python -m jdist.launch`: the workers of one machine, as torchrun starts them.

A command line only; docs/launch.md describes it.
"""

__all__: list[str] = []
