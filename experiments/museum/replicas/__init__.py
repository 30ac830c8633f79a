"""Data parallelism: who sums, who averages, and over what."""
