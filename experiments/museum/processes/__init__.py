"""Two processes of `jax.distributed`."""
