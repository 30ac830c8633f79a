"""The rows of `python -m jdist.verify`: every strategy of jdist, for the judge.

This is the only part that imports all strategies. It does not import the judge, and the
judge does not import it: the judge finds rows by the entry-point group `jdist.verify`,
to which other packages can add rows.
"""

from collections.abc import Mapping

from jdist.matrix import autograd, data_parallel, pipeline, processes
from jdist.matrix.row import Candidate, LossFn, Row

__all__ = ["Candidate", "LossFn", "Row", "strategies"]


def strategies() -> dict[str, Row | Mapping[str, Row]]:
    """All rows by name; combinations of other rows are in nested mappings."""
    return {
        **data_parallel.rows(),
        **processes.rows(),
        **pipeline.rows(),
        **autograd.rows(),
    }
