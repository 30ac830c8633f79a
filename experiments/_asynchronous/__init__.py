"""Asynchronous pipelines: rules as data, and epochs as one compiled program."""
