"""Pictures of a context's graph over all workers: as data, as Mermaid and as SVG."""

__all__: list[str] = []
