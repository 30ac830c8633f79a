"""Connections between workers: frames, sockets, TLS, shared memory."""
