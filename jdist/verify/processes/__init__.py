"""Verification over several processes: shards are judged where they are held."""

__all__: list[str] = []
