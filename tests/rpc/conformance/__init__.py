"""Scenarios of torch's own tests of rpc that no other test here has; see
docs/conformance.md."""
