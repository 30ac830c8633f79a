"""Optimizers on shards, their states and what they decay."""
