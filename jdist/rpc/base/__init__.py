"""What every room of rpc builds on: errors, options, ids, deadlines, futures."""

__all__: list[str] = []
