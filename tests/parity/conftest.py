"""What `make test` leaves alone, because torch is not there."""

# Imported by tests of this folder only; as a module with docstrings it would be read.
collect_ignore = ["examples_in_torch.py", "migration_in_torch.py"]
