"""Mixtures of experts: their parallelism and their auxiliary losses."""
