"""Findings on what is installed, whether it works, and whether ranks reach each other: `thinwire doctor`."""
