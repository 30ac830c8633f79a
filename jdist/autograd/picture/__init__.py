"""Pictures of a context's graph over all workers: as data and as Mermaid."""

__all__: list[str] = []
