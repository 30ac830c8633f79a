"""Contexts: distributed computations, with their ids, gradients and end."""

__all__: list[str] = []
