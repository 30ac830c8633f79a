"""The whole batch's loss and gradient from replicas that each see a part."""

__all__: list[str] = []
