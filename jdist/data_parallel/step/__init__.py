"""Training steps over replicas, their variants, and the loop over batches."""

__all__: list[str] = []
