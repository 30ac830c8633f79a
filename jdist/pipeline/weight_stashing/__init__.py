"""PipeDream: asynchronous epochs with weight stashing."""

__all__: list[str] = []
