"""A whole pipeline as one SPMD program."""
