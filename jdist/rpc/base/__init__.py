"""Ground floor of rpc: errors, options, ids, deadlines, futures, locks, threads."""

__all__: list[str] = []
