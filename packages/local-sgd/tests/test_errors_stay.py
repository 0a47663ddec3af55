"""An exchange that failed stays failed: the same error at every later use, never one of its own insides."""

from types import SimpleNamespace

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, schedules, start
from local_sgd import CoCoDSGD, OverlapLocalSGD, StreamingDiLoCo

pytestmark = pytest.mark.quick


def make(algorithm, task, comm, **options):
    inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
    return algorithm(inner, comm=comm, model=task.model, sync_every=3, **options)


class Everything:
    """A compressor that keeps nothing back."""

    def compress(self, name, delta):
        return delta

    def restore(self, name, dropped):
        raise AssertionError("nothing was dropped")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


def in_the_background(sent, comm):
    schedule = schedules.allreduce(sent, comm.rank, comm.size)
    return start(total_of(schedule), comm, facts="sum")


def total_of(schedule):
    return SimpleNamespace(total=(yield from schedule), dropped=None)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (CoCoDSGD, {}),
        (OverlapLocalSGD, {}),
        (StreamingDiLoCo, {"fragments": 2}),
        (StreamingDiLoCo, {"fragments": 2, "compress": "int8"}),
        (StreamingDiLoCo, {"compress": Everything(), "allreduce": in_the_background}),
    ],
)
@pytest.mark.parametrize("later", [("average", "state_dict", "wait"), ("state_dict", "average", "drain")])
def test_an_error_under_way_is_raised_again_at_every_use(quadratic, saved, algorithm, options, later):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm, **options)
        state = saved(optimizer.state_dict())
        task.train(optimizer, range(3))
        if comm.rank == 1:
            return
        with pytest.raises(CollectiveError, match="rank 0 waits for rank 1") as first:
            task.train(optimizer, range(3, 9))
        for name in later:
            with pytest.raises(CollectiveError) as again:
                optimizer.average() if name == "average" else getattr(optimizer, name)()
            assert again.value is first.value
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(CollectiveError) as again:
            optimizer.load_state_dict(state)
        assert again.value is first.value
        assert optimizer.param_groups[0]["lr"] == 0.5, "half of the state was loaded"

    SimulatedWorld(2).run(body)


def test_a_launch_that_fails_is_an_error_at_every_use(quadratic):
    """Of two vectors the second one is not sent: the rank is not left with half an exchange."""

    def body(comm):
        task = quadratic(comm.rank)
        compressor = Everything()
        optimizer = make(
            StreamingDiLoCo, task, comm, bucket_bytes=20, fragments=1, compress=compressor, allreduce=in_the_background
        )
        begun = []

        def compress(name, delta):
            begun.append(name)
            if len(begun) == 2:
                raise RuntimeError("out of memory")
            return delta

        compressor.compress = compress
        with pytest.raises(RuntimeError, match="out of memory") as first:
            task.train(optimizer, range(3))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory") as again:
                optimizer.average()
            assert again.value is first.value

    SimulatedWorld(1).run(body)
