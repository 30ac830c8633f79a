"""Where a run's data, processes and checkpoints come from."""

__all__: list[str] = []
