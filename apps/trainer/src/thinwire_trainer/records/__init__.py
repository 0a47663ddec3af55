"""Files that a run writes to its folder, such that it survives a kill."""
