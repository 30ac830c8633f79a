"""Tests of `verify`."""
