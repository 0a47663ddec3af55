"""DDP with checkpoints: a run that was stopped goes on, on as many ranks or on another number of them.

    torchrun --nproc-per-node 2 examples/ddp_checkpoints.py runs/digits
    torchrun --nproc-per-node 3 examples/ddp_checkpoints.py runs/digits      # goes on, with every rank's residuals

What has not been sent yet belongs to one rank alone, so every rank saves its own state, and nothing is lost.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from data_parallel import SparseHookState, reshard_residuals, sparse_hook
from ddp_digits import BATCH, digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2  # a run


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: SparseHookState) -> None:
    """One file a rank; the file that says which epoch they are of comes last, when all are there."""
    rank = dist.get_rank()
    everything = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "hook": state.state_dict()}
    torch.save(everything, folder / f"epoch{epoch}-rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        (folder / "latest.new").write_text(f"{epoch} {dist.get_world_size()}")
        os.replace(folder / "latest.new", folder / "latest")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: SparseHookState) -> int:
    """The number of epochs that were trained already."""
    if not (folder / "latest").exists():
        return 0
    epoch, size = map(int, (folder / "latest").read_text().split())
    ranks = [torch.load(folder / f"epoch{epoch}-rank{rank}.pt", weights_only=True) for rank in range(size)]
    model.load_state_dict(ranks[0]["model"])
    optimizer.load_state_dict(ranks[0]["optimizer"])
    hooks = [rank["hook"] for rank in ranks]
    if size != dist.get_world_size():
        hooks = reshard_residuals(hooks, size=dist.get_world_size())
    state.load_state_dict(hooks[dist.get_rank()])
    return epoch


def main(folder: Path) -> None:
    """Two epochs more."""
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    state = SparseHookState(density=0.02, momentum=0.9, named_parameters=model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = load(folder, model, optimizer, state)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, sparse_hook)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)
    for epoch in range(first, first + EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
        save(folder, epoch + 1, model, optimizer, state)
    images, labels = test_set.tensors
    accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    if dist.get_rank() == 0:
        print(f"epochs {first + 1} to {first + EPOCHS} on {dist.get_world_size()} ranks: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    where.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    main(where)
    dist.destroy_process_group()
