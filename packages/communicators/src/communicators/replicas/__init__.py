"""State that the replicas of a model share: named parameters, an equal start, and their places in a checkpoint."""
