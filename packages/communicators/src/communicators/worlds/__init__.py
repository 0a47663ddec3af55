"""The worlds of real ranks: one alone, MPI, torch.distributed."""
