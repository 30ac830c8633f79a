"""Where the stages are in the tests."""

from jdist import pipeline
from tests.rpc.hosts import names


def workers(count):
    """The first workers of a cluster."""
    return pipeline.Workers(names(count))
