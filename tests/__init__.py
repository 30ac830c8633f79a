"""The tests; they mirror the library's files."""
