"""The communication hook for DistributedDataParallel."""
