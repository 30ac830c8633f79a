"""Connections between workers: frames, sockets, TLS, shared memory."""

__all__: list[str] = []
