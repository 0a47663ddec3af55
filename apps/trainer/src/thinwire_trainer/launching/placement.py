"""Where the launcher put this process: read from the environment, before MPI or torch is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

# launcher: variables of rank, world size and local rank. The first launcher whose rank and size are set is taken:
# `mpiexec` inside a Slurm job sets both its own and Slurm's. A Slurm batch script itself has SLURM_PROCID but no
# SLURM_STEP_NUM_TASKS: it is not a worker.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # a script that sets RANK itself may end before what it started in the background


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rank, world size and rank on this machine, as the launcher says; alone where there is none."""

    launcher: str | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    watches: bool = False  # whether this process is to end when the one that started it does

    @property
    def uses_mpi(self) -> bool:
        """Whether MPI carries the messages (otherwise torch.distributed does, or nothing has to)."""
        return self.launcher is not None and self.launcher != "torchrun"


def placement(environment: Mapping[str, str]) -> Placement:
    """The placement that `environment` (normally `os.environ`) describes."""
    for launcher, (rank, size, local_rank) in LAUNCHERS.items():
        if rank in environment and size in environment:
            # srun with PMI sets PMI_RANK but not the wheel's local rank.
            local = environment.get(local_rank, environment.get("SLURM_LOCALID", "0"))
            return Placement(
                launcher=launcher,
                rank=int(environment[rank]),
                size=int(environment[size]),
                local_rank=int(local),
                watches=launcher != "torchrun" or BY_TORCHRUN in environment,
            )
    return Placement()
