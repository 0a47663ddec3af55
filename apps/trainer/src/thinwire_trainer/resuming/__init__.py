"""Going on with a run: what was saved must be what this run could have saved."""
