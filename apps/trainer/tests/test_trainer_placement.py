"""Which launcher started this process, and as what."""

import sys
from types import ModuleType

import pytest
from mpi4py import MPI
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching import placement as module
from thinwire_trainer.launching.placement import Placement, first_complaint, joined, placement

MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
STEP = SLURM | {"SLURM_STEP_NODELIST": "gpu-a[03-05,9],gpu-b7", "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Placement()),
        (MPICH, Placement(launcher="mpiexec", rank=2, size=4, local_rank=1, watches=True)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Placement(launcher="mpirun", rank=1, size=2, local_rank=0, watches=True),
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"},
            Placement(launcher="torchrun", rank=3, size=4, local_rank=3),
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "none"},
            Placement(launcher="torchrun", rank=3, size=4, local_rank=3, watches=True),
        ),
        (SLURM, Placement(launcher="srun", rank=5, size=8, local_rank=1, watches=True, meeting="localhost:21477")),
        (STEP, Placement(launcher="srun", rank=5, size=8, local_rank=1, watches=True, meeting="gpu-a03:25545")),
        (
            STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            Placement(launcher="srun", rank=5, size=8, local_rank=1, watches=True, meeting="10.0.0.1:29500"),
        ),
        (SLURM | {"PMIX_RANK": "5"}, Placement(launcher="srun", rank=5, size=8, local_rank=1, watches=True)),
        (
            SLURM | {"I_MPI_PMI_LIBRARY": "libpmi2.so"},
            Placement(launcher="srun", rank=5, size=8, local_rank=1, watches=True),
        ),
        (SLURM | MPICH, Placement(launcher="mpiexec", rank=2, size=4, local_rank=1, watches=True)),
        (
            SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"},
            Placement(launcher="mpiexec", rank=5, size=8, local_rank=1, watches=True),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Placement()),  # a batch script, not a worker
    ],
)
def test_placement(environment: dict[str, str], expected: Placement) -> None:
    assert placement(environment) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-2]", "node1"),
        ("node[1,4-5]-ib", "node1-ib"),
        ("a[01-2],b[3-4]", "a01"),
    ],
)
def test_ranks_of_srun_meet_on_the_first_node(nodes: str, first: str) -> None:
    host, port = placement(SLURM | {"SLURM_STEP_NODELIST": nodes}).meeting.split(":")
    assert host == first
    assert 20000 <= int(port) < 30000


def test_mpi4py_without_an_mpi_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unloadable(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("cannot load MPI library\nlibmpi.so.12: no such file")

    monkeypatch.setitem(sys.modules, "mpi4py", Unloadable("mpi4py"))
    with pytest.raises(
        RunError, match=r"MPI cannot be used \(cannot load MPI library\): pip install mpi4py mpich"
    ) as told:
        first_complaint("", Placement(launcher="mpiexec", size=2))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("environment", "error", "said"),
    [
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "", "GLOO_SOCKET_IFNAME is 'nosuch0', no interface of this host"),
        (
            {},
            "code: -98, name: EADDRINUSE",
            "127.0.0.1:1 (MASTER_ADDR, MASTER_PORT) is taken by another program or job",
        ),
        (
            {},
            "Gloo connectFullMesh failed with [pair.cc]",
            "the ranks have met, but cannot connect to each other: open",
        ),
        ({}, "Timed out\nat pair.cc", "do not meet at 127.0.0.1:1 (MASTER_ADDR, MASTER_PORT): Timed out; `python -m"),
    ],
)
def test_ranks_that_do_not_meet_under_torchrun(
    environment: dict[str, str], error: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (place | environment).items():
        monkeypatch.setenv(name, value)
    if error:
        monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: _raise(RuntimeError(error)))
    else:
        monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(RunError) as raised, joined(placement(place)):
        pass
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.mpi
def test_open_mpis_launcher_and_mpichs_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH would abort the process at its start."""
    monkeypatch.setattr(MPI, "Is_initialized", lambda: False)
    monkeypatch.setattr(MPI, "Get_library_version", lambda: "MPICH Version:      4.2\nmore")
    with pytest.raises(
        RunError, match=r"mpirun of Open MPI started 2 ranks, but mpi4py has MPICH Version: 4\.2: start"
    ):
        module._mpi_world(Placement(launcher="mpirun", size=2))
