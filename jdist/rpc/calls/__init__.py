"""Calls between workers: the caller's side and the callee's side."""

__all__: list[str] = []
