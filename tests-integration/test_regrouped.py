"""A rank dies, and those that are left go on in a group that is new, or was set up anew: they meet at once."""

from __future__ import annotations

import pytest
import torch.distributed as dist

REGROUPED = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
from communicators import CollectiveError, allreduce, as_communicator
how, place = sys.argv[1], int(os.environ["RANK"])  # three ranks and a spare one
patience = datetime.timedelta(seconds=40)
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, place == 0, patience, wait_for_workers=False)

class Own(dist.ProcessGroup):
    rank, size = (lambda self: self.place[0]), (lambda self: self.place[1])

def own(rank, size):
    group = Own(rank, size)
    group.place = rank, size
    return group

def opened(name, rank, size, **options):
    where = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=where, rank=rank, world_size=size, timeout=patience, **options)

def reconfigured(turn, places):
    store.set(f"handle {turn} {place}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle {turn} {one}").decode() for one in places]
    dist._reconfigure(uuid=turn, handles=handles, timeout=patience).wait()

def summed(group, **given):
    comm = as_communicator(group, **given)
    return comm, allreduce(torch.ones(3), comm).tolist()

if place < 3:
    given = {"store": store} if how == "replaced" else {}
    if how == "replaced":
        group = own(place, 3)
    else:
        opened("first", place, 3, **({"enable_reconfigure": True} if how == "reconfigure" else {}))
        group = dist.group.WORLD
    if how == "reconfigure":
        reconfigured(1, range(3))
    comm, total = summed(group, **given)
    assert total == [3.0] * 3
    store.add("summed", 1)
    if place == 1:
        while store.add("summed", 0) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            allreduce(torch.ones(3), comm)
    except CollectiveError as error:
        assert "rank 1 is gone" in str(error), error
    store.add("failed", 1)
while store.add("failed", 0) < 2:
    time.sleep(0.01)
if how == "new_group" and place < 3:
    group, size, given = dist.new_group([0, 2], use_local_synchronization=True), 2, {}
elif how == "init":
    if place < 3:
        dist.destroy_process_group()
    opened("second", [0, None, 1, 2][place], 3)
    group, size, given = None, 3, {}
elif how == "replaced":
    group, size, given = (group if place < 3 else own(1, 3)), 3, {"store": store}
elif how == "reconfigure":
    if place == 3:
        opened("first", 1, 3, enable_reconfigure=True)
    reconfigured(2, [0, 3, 2])
    group, size, given = dist.group.WORLD, 3, {}
else:
    group = "none"
if group != "none":
    begin = time.monotonic()
    comm, total = summed(group, **given)
    assert total == [float(size)] * 3
    assert as_communicator(group, **given) is comm
    print(time.monotonic() - begin)
"""


@pytest.mark.parametrize("how", ["new_group", "init", "replaced", "reconfigure"])
def test_gloo_who_is_left_after_a_death_goes_on(processes, tmp_path, how):
    """Their `timeout` is 40 s."""
    if how == "reconfigure" and not hasattr(dist, "_reconfigure"):
        pytest.skip("torch sets up groups anew in place since 2.14")
    script = tmp_path / "regrouped.py"
    script.write_text(REGROUPED)
    done = processes(4, script, how, timeout=100)
    assert done.pop(1).returncode == -9
    for launch in done:
        assert launch.returncode == 0, launch.stderr
    seconds = [float(launch.stdout) for launch in done if launch.stdout]
    assert len(seconds) == (2 if how == "new_group" else 3)
    assert max(seconds) < 20  # the machine may be busy
