"""The group of workers: rendezvous, membership, liveness and collectives."""

__all__: list[str] = []
