"""Bytes that stats() tells are those that leave a rank's network interface, without the headers of TCP/IP."""

import json
import sys

import pytest
from slow_link import SlowLink, missing

LACKING = missing()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no emulated link here: {'; '.join(LACKING)}")

HEADER_BYTES = 20 + 32
"""Bytes of IPv4 and of TCP with time stamps in every packet; a TUN device carries no Ethernet frames."""
TRAINS = """
import json, pathlib, sys, time
import torch, torch.distributed as dist
from communicators import as_communicator, barrier
from data_parallel import DistributedOptimizer
from local_sgd import DiLoCo
from partial_collectives import EagerSGD
from torch.nn.parallel import DistributedDataParallel
from data_parallel import SparseHookState, sparse_hook

dist.init_process_group("gloo")
interface = pathlib.Path("/sys/class/net", sys.argv[1], "statistics")
model = torch.nn.Linear(500, 400)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
comm, families = as_communicator(None), {}
dist_optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, density=0.1)
families["DistributedOptimizer"] = dist_optimizer.step, dist_optimizer.stats
hooked = torch.nn.Linear(500, 400)
ddp, state = DistributedDataParallel(hooked), SparseHookState(density=0.1)
ddp.register_comm_hook(state, sparse_hook)
families["SparseHookState"] = torch.optim.SGD(hooked.parameters(), lr=0.01).step, state.stats
averaged = torch.nn.Linear(500, 400)
diloco = DiLoCo(torch.optim.SGD(averaged.parameters(), lr=0.01), comm=comm.duplicate(), sync_every=2, model=averaged)
families["DiLoCo"] = lambda: (diloco.step(), diloco.average()), diloco.stats
early = torch.nn.Linear(500, 400)
eager = EagerSGD(torch.optim.SGD(early.parameters(), lr=0.01), early.named_parameters(), comm=comm.duplicate())
families["EagerSGD"] = eager.step, eager.stats
trained = {"DistributedOptimizer": model, "SparseHookState": ddp, "DiLoCo": averaged, "EagerSGD": early}

def counted(stats):
    barrier(comm)
    time.sleep(0.3)  # what is queued leaves
    read = [int((interface / name).read_text()) for name in ("tx_bytes", "tx_packets")]
    return [*read, stats()["bytes_sent"]]

found = {}
for name, (step, stats) in families.items():
    counts = []
    for number in range(24):
        if number in (4, 23):
            counts.append(counted(stats))
        trained[name](torch.randn(4, 500)).square().mean().backward()
        step()
    found[name] = [after - before for before, after in zip(*counts)]
print(json.dumps([dist.get_rank(), found]))
eager.finish()
eager.close()
dist.destroy_process_group()
"""


@pytest.mark.few(0)
def test_bytes_sent_are_those_of_the_interface(tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    with SlowLink(ranks=3, mbit_per_second=1000, milliseconds=0.1) as link:
        ended = link.processes([sys.executable, str(script), link.device], timeout=200)
    told = [json.loads(each.stdout.splitlines()[-1]) for each in ended]
    assert sorted(rank for rank, _ in told) == [0, 1, 2]
    for rank, families in told:
        for family, (tx_bytes, tx_packets, sent) in families.items():
            assert sent > 500_000
            assert sent == pytest.approx(tx_bytes - HEADER_BYTES * tx_packets, rel=0.02), (rank, family)
