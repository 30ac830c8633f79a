"""Optimizers over parameters that live on many workers."""

__all__: list[str] = []
