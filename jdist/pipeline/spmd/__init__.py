"""A whole pipeline as one SPMD program."""

__all__: list[str] = []
