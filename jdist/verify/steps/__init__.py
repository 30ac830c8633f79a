"""Verification of whole optimizer steps: the first wrong step, and its wrong part."""

__all__: list[str] = []
