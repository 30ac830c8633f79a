"""Remote references."""
