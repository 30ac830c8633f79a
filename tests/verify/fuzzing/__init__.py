"""Tests of the search for the smallest layout in which a trainer is wrong."""
