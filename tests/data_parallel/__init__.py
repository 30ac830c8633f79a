"""Tests of `data_parallel`."""
