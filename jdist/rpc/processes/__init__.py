"""Starting workers: spawned processes and clusters within one process."""
