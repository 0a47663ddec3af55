"""Live view of a running training in the terminal: `thinwire top`."""
