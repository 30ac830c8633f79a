"""The group of workers: rendezvous, membership, liveness and collectives."""
