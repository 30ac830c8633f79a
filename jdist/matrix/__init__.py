"""The rows of `python -m jdist.verify`: every strategy of jdist, for the judge.

The only part that imports all strategies. The judge imports none of them and is not
imported here; the two meet in the entry-point group `jdist.verify`, where other
packages add rows of their own.
"""

from collections.abc import Mapping

from jdist.matrix import autograd, data_parallel, pipeline, processes
from jdist.matrix.row import Candidate, LossFn, Row

__all__ = ["Candidate", "LossFn", "Row", "strategies"]


def strategies() -> dict[str, Row | Mapping[str, Row]]:
    """All rows by name; combinations of what others show in mappings of their own."""
    return {
        **data_parallel.rows(),
        **processes.rows(),
        **pipeline.rows(),
        **autograd.rows(),
    }
