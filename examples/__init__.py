"""torch's distributed tutorials, written with jdist; README.md lists them."""
