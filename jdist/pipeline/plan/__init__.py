"""Planning: profiles of layers, cuts of a model, and PipeDream's partitioning."""

__all__: list[str] = []
