"""One optimizer per file: the formula, the state of a leaf, and the constructor."""

__all__: list[str] = []
