"""Backward passes over the graphs of all workers of a context."""

__all__: list[str] = []
