"""A DDP step that torch.profiler records: selection and exchange are seen beside backward, on tracks of their own."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from communicators import tracing
from data_parallel import SparseHookState, sparse_hook
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
scaler = torch.amp.GradScaler("cpu")
state = SparseHookState(density=0.05, grad_scaler=scaler)
ddp.register_comm_hook(state, sparse_hook)


def step():
    ddp.zero_grad()
    scaler.scale(ddp(torch.randn(256, 256)).square().mean()).backward()


for _ in range(2):  # DDP cuts its buckets anew after the first step
    step()
before, sent = state.stats(), state.comm.bytes_sent
with tracing.recording() as recorded:
    step()
stats = state.stats()
assert stats["bytes_sent"] - before["bytes_sent"] == state.comm.bytes_sent - sent > 0
assert abs(stats["bytes_dense"] - 3 * 4 * sum(p.numel() for p in model.parameters())) < 8, stats
assert stats["seconds_hidden"] > 0 and stats["seconds_waited"] > 0, stats
assert abs(stats["seconds_hidden"] + stats["seconds_waited"] - stats["seconds_exchanging"]) < 1e-9, stats
assert stats["residual_norm"] > 0 and stats["density"] == 0.05 and stats["steps"] == 3, stats
assert "rank 0 of 2" in repr(state) or dist.get_rank(), state
if dist.get_rank() == 0:
    tracing.write_trace(recorded, sys.argv[1])
dist.destroy_process_group()
"""


def spans(events, name):
    found = [e for e in events if e.get("ph") == "X" and e["name"] == name]
    return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["tid"]) for e in found)


@pytest.mark.quick
def test_selection_and_exchange_are_seen_beside_backward(processes, tmp_path):
    script, trace = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    for done in processes(2, script, trace):
        assert done.returncode == 0, done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    backward = spans(events, "AddmmBackward0")
    select, exchange, merge, restore = (spans(events, name) for name in ("select", "exchange", "merge", "restore"))
    assert len(backward) == len(select) == len(exchange) == len(restore) == 6
    assert len(merge) >= 6
    began, ended = backward[0][0], backward[-1][1]
    beside = [one for one in exchange if one[0] < ended and began < one[1]]
    assert len(beside) >= 4, "exchanges go on while backward does"
    assert any(one[0] < layer[1] and layer[0] < one[1] for one in beside for layer in backward)
    assert all(began < one[0] for one in select)
    [main] = {track for _, _, track in backward}
    assert {track for _, _, track in select} == {main}
    assert main not in {track for _, _, track in (*exchange, *merge)}
    for track in {track for _, _, track in exchange}:
        bars = [one for one in exchange if one[2] == track]
        assert all(one[1] <= other[0] for one, other in pairwise(bars)), "viewers leave out what overlaps on a track"
