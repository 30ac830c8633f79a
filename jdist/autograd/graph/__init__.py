"""The local graph: recorded values, the functions between them, and pullbacks."""
