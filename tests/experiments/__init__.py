"""Tests of `experiments`."""
