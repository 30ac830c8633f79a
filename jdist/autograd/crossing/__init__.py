"""Send and receive functions, recorded where calls and replies cross workers."""

__all__: list[str] = []
