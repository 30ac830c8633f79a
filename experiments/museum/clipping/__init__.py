"""Norms over shards, experts and replicas, and what is clipped by them."""
