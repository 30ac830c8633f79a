"""Tests of remote references."""
