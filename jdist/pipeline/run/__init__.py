"""Executing a schedule: stages, channels between them, and updates."""
