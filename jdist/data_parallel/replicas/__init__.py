"""Replicas: which arrays lie on each, and running one function on all of them."""

__all__: list[str] = []
