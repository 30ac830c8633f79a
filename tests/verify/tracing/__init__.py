"""Tests of taps, their recordings, and the search for the first wrong value."""
