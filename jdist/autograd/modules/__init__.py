"""Flax NNX modules whose parameters are variables."""

__all__: list[str] = []
