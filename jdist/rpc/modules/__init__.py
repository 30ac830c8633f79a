"""Modules that live on a worker and are used from others."""

__all__: list[str] = []
