"""Tests of jdist.targets; those that need a compiler are skipped without it."""
