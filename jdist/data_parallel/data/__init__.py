"""Data, processes and checkpoints of a training run."""

__all__: list[str] = []
