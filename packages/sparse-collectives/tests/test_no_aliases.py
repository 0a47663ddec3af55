"""A call sums what it was given at its start, and what it returns is no memory that a message is still read from."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from communicators import Round, SimulatedWorld
from sparse_collectives import (
    ALGORITHMS,
    WIRES,
    sparse_allreduce,
    sparse_allreduce_array,
    sparse_allreduce_array_async,
    sparse_allreduce_async,
)
from sparse_collectives.allreduce import prepare
from sparse_compress import SparseVector, topk

K, NUMEL = 4, 24
WAYS = [(name, wire) for name, entry in ALGORITHMS.items() for wire in WIRES if entry.selects or wire == "fp32"]
FORMS = {
    "sparse": lambda x: topk(x, K),
    "tensor": lambda x: x.clone().view(4, 6),
    "view": lambda x: torch.stack([x, x], 1)[:, 0].view(6, 4),
    "numpy": lambda x: x.numpy().copy().reshape(2, 12),
    "half": lambda x: x.half(),
    "read-only": lambda x: _read_only(x.numpy().copy()),
}


def _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


def overwrite(given):
    """As a caller may, as soon as the call has returned."""
    if isinstance(given, SparseVector):
        given.values.fill_(777)
        given.indices.copy_(torch.arange(len(given)))
    elif isinstance(given, np.ndarray):
        (given if given.flags.writeable else given.base)[...] = 777
    else:
        given.fill_(777)


def parts(result):
    """Total and dropped as dense tensors, flat."""
    whole = [part.to_dense() if isinstance(part, SparseVector) else part for part in (result.total, result.dropped)]
    return [torch.as_tensor(np.asarray(part)).reshape(-1) for part in whole]


def arguments(name, form):
    """k unless an array is summed as it is, and a state where the algorithm keeps one."""
    entry = None if name == "auto" else ALGORITHMS[name]
    state = {} if entry is None else entry.initial_state()
    whole = entry is not None and not entry.selects and form != "sparse"
    k = {} if whole else {"k": K}
    return {"algorithm": name, **k, **({} if state is None else {"state": state})}


@pytest.mark.few(28)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*ALGORITHMS, "auto"])
@pytest.mark.parametrize("size", [1, 3])
def test_in_the_background_the_input_may_change_at_once(name, form, size):
    values = torch.randint(-9, 10, (size, NUMEL), generator=torch.Generator().manual_seed(1)).float()

    def kept(comm):
        call = sparse_allreduce if form == "sparse" else sparse_allreduce_array
        return call(FORMS[form](values[comm.rank]), comm, **arguments(name, form))

    def changed(comm):
        given = FORMS[form](values[comm.rank])
        call = sparse_allreduce_async if form == "sparse" else sparse_allreduce_array_async
        work = call(given, comm, **arguments(name, form))
        overwrite(given)
        return work.wait()

    expected, results = SimulatedWorld(size).run(kept), SimulatedWorld(size, seed=3, jitter=1e-3).run(changed)
    for one, other in zip(expected, results, strict=True):
        assert all(map(torch.equal, parts(one), parts(other)))


@pytest.mark.few(109)
@pytest.mark.parametrize(("name", "wire"), WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_comes_back_is_nobody_elses_memory(name, wire, size):
    """Messages may be under way when the call is over; the caller may write into its results, and its input, then."""
    given = [topk(torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)), K) for rank in range(size)]
    dense = [vector.to_dense() for vector in given]
    ranks = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    for options in ALGORITHMS[name].variants(size):
        schedules = [
            prepare(given[comm.rank], comm, K, algorithm=name, options=options, wire=wire)[0] for comm in ranks
        ]
        check_memory(*in_lockstep(schedules))
    assert all(torch.equal(v.to_dense(), w) for v, w in zip(given, dense, strict=True))


def check_memory(results, sent):
    """Of one call, whose results are overwritten."""
    before = [payload.clone() for payload in sent]
    copies = [parts(result) for result in results]
    for result, one in zip(results, copies, strict=True):
        overwrite(result.total)
        assert torch.equal(parts(result)[1], one[1])  # total and dropped are not each other's memory either
        overwrite(result.dropped)
    assert all(torch.equal(payload.body, kept.body) for payload, kept in zip(sent, before, strict=True))


def in_lockstep(schedules):
    """Their results, and every payload, as it lies in its sender's memory: nothing waits for the sends."""
    size = len(schedules)
    results, sent, boxes = [None] * size, [], {}
    waiting = {rank: next_action(schedules[rank], None, results, rank) for rank in range(size)}
    while any(action is not None for action in waiting.values()):
        for rank, action in waiting.items():
            if action is not None and not action[1]:
                for peer, payload in action[0].sends.items():
                    sent.append(payload)
                    boxes.setdefault((rank, peer), []).append(payload.clone())
                waiting[rank] = (action[0], True)
        for rank, action in list(waiting.items()):
            if action is not None and all(boxes.get((peer, rank)) for peer in action[0].recvs):
                received = {peer: boxes[peer, rank].pop(0) for peer in action[0].recvs}
                waiting[rank] = next_action(schedules[rank], received, results, rank)
    return results, sent


def next_action(schedule, received, results, rank):
    try:
        action = next(schedule) if received is None else schedule.send(received)
    except StopIteration as stop:
        results[rank] = stop.value
        return None
    assert isinstance(action, Round)
    return action, False
