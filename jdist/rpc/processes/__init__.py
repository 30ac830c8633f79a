"""Starting workers: spawned processes and clusters within one process."""

__all__: list[str] = []
