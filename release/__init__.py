"""Is this tree ready to be published? `hatch run release-check`."""
