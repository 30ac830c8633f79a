"""Send and receive functions, recorded where a call crosses workers."""
