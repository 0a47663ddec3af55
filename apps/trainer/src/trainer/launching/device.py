"""The device of this rank."""

import os

import torch


def own_device(local_rank: int) -> torch.device:
    """The GPU with this rank's number on its machine (they wrap round), or the CPU where there is none.

    Results are to be the same bits after a resume, so cuDNN is held to deterministic kernels, and ranks that share
    a machine's cores take one thread each unless OMP_NUM_THREADS says otherwise.
    """
    if torch.cuda.is_available():
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")
