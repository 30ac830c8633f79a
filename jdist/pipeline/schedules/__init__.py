"""The published schedules, one family per file."""

__all__: list[str] = []
