"""Executing a schedule: stages, channels between them, and updates."""

__all__: list[str] = []
