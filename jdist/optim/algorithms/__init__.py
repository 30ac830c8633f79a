"""One optimizer per file: its formula, the state of a leaf, and the constructor."""

__all__: list[str] = []
