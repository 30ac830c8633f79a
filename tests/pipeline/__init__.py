"""Tests of `jdist.pipeline`."""
