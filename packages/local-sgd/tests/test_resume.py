"""Checkpoints: the same bits as uninterrupted, also in mid-block and with an exchange under way."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from communicators import CollectiveError, SimulatedWorld
from local_sgd import BMUF, EASGD, CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, SlowMo, periodic
from local_sgd.parts import digest
from old_torch import since_2_7
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

STEPS = 11


def make(algorithm, task, comm, *, inner=torch.optim.Adam, sync_every=3, **options):
    return algorithm(
        inner(task.model.parameters(), lr=0.1), comm=comm, model=task.model, sync_every=sync_every, **options
    )


def train(task, optimizer, steps):
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
        task.train(optimizer, [step])


def everything(task, optimizer):
    """x, and the whole state as one list of tensors and numbers."""
    state = optimizer.state_dict()
    return [task.flat(), *tree(state)]


def tree(node):
    if isinstance(node, dict):
        return [leaf for key in sorted(node, key=str) for leaf in tree(node[key])]
    if isinstance(node, list | tuple):
        return [leaf for one in node for leaf in tree(one)]
    return [node.clone() if isinstance(node, torch.Tensor) else node]


def assert_same_bits(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("at", "dtype"), [*((at, torch.float32) for at in (1, 3, 4, 6)), (3, torch.bfloat16), (5, torch.bfloat16)]
)
def test_resumed_runs_have_the_same_bits(quadratic, saved, algorithm, at, dtype):
    def whole(comm):
        task = quadratic(comm.rank, dtype=dtype)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(STEPS))
        before = everything(task, optimizer)
        optimizer.finish()
        return before + everything(task, optimizer)

    def interrupted(comm):
        task = quadratic(comm.rank, dtype=dtype)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(at))
        state, weights = saved(optimizer.state_dict()), saved(task.model.state_dict())
        task = quadratic(comm.rank, dtype=dtype)
        optimizer = make(algorithm, task, comm)
        if at % 2:  # in either order
            task.model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        else:
            optimizer.load_state_dict(state)
            task.model.load_state_dict(weights)
        train(task, optimizer, range(at, STEPS))
        before = everything(task, optimizer)
        optimizer.finish()
        return before + everything(task, optimizer)

    for one, other in zip(SimulatedWorld(3).run(whole), SimulatedWorld(3).run(interrupted), strict=True):
        assert_same_bits(one, other)


@pytest.mark.few(6)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("at", [3, 4])
def test_one_state_of_all_ranks_goes_on_with_the_same_bits(quadratic, saved, algorithm, size, at):
    """At a boundary and in mid-block."""

    def whole(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(at))
        state, weights = optimizer.gathered_state_dict(), saved(task.model.state_dict())
        train(task, optimizer, range(at, STEPS))
        return state, weights, everything(task, optimizer)

    written = SimulatedWorld(size).run(whole)
    assert [state for state, *_ in written[1:]] == [{}] * (size - 1)

    def resumed(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.model.load_state_dict(written[comm.rank][1])
        optimizer.load_state_dict(saved(written[0][0]))
        train(task, optimizer, range(at, STEPS))
        return everything(task, optimizer)

    for (*_, one), other in zip(written, SimulatedWorld(size).run(resumed), strict=True):
        assert_same_bits(one, other)
    another = SimulatedWorld(size + 1)
    with pytest.raises(ValueError, match=f"the state holds those of {size} ranks, but there are {size + 1} now: call"):
        another.run(lambda comm: make(algorithm, quadratic(comm.rank), comm).load_state_dict(written[0][0]))


def test_looking_changes_nothing(quadratic, algorithm):
    """State and model may be asked for at every step, with an exchange under way or not."""

    def body(comm, curious):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        for step in range(STEPS):
            train(task, optimizer, [step])
            if curious:
                optimizer.state_dict()
                with optimizer.averaged_model() as model:
                    assert model is task.model
        return everything(task, optimizer)

    worlds = [SimulatedWorld(3).run(lambda comm, c=curious: body(comm, c)) for curious in (False, True)]
    for one, other in zip(*worlds, strict=True):
        assert_same_bits(one, other)


def test_the_function_of_steps_is_asked_once_a_block(quadratic, saved):
    """A state from the middle of a block knows how long that is, and the next one begins where it should."""

    def body(comm):
        asked = []
        task = quadratic(comm.rank)
        every = lambda step: asked.append(step) or (1 if step < 3 else 4)  # noqa: E731
        optimizer = make(LocalSGD, task, comm, sync_every=every)
        train(task, optimizer, range(5))
        state, weights = saved(optimizer.state_dict()), copy.deepcopy(task.model.state_dict())
        optimizer = make(LocalSGD, task, comm, sync_every=every)
        task.model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(task, optimizer, range(5, 12))
        return asked

    assert SimulatedWorld(2).run(body) == [[0, 1, 2, 3, 7, 11]] * 2


@since_2_7("cannot save a checkpoint without a group")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_leaves_nothing_out(quadratic, algorithm, tmp_path):
    """Into a new optimizer, which has no state yet."""

    def whole(comm):
        task = quadratic(0)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(STEPS))
        return everything(task, optimizer)

    def interrupted(comm):
        task = quadratic(0)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(4))
        # two threads, because one overlaps copies by streams where a device of one's own is known, as in other tests
        writer = FileSystemWriter(tmp_path / "checkpoint", thread_count=2)
        dcp.save({"model": task.model, "optimizer 0": optimizer}, storage_writer=writer, no_dist=True)
        task = quadratic(0)
        optimizer = make(algorithm, task, comm)
        template = {"model": task.model.state_dict(), "optimizer 0": optimizer.state_dict()}
        dcp.load(template, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        task.model.load_state_dict(template["model"])
        optimizer.load_state_dict(template["optimizer 0"])
        train(task, optimizer, range(4, STEPS))
        return everything(task, optimizer)

    assert_same_bits(SimulatedWorld(1).run(whole)[0], SimulatedWorld(1).run(interrupted)[0])


def states(quadratic, saved, algorithm, size, *, drained, steps=5, by="state_dict"):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(steps))
        if drained:
            optimizer.drain()
        state, weights = saved(getattr(optimizer, by)()), saved(task.model.state_dict())
        optimizer.finish()
        return state, weights

    return SimulatedWorld(size).run(body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state["distributed"].update(world_size=4), r"of 4 ranks, but there are 2 now: call drain\(\)"),
        (lambda state: state["distributed"].update(rank=1), "the state of rank 1 given to rank 0"),
        (
            lambda state: state["distributed"].update(algorithm="EASGD"),
            "of EASGD, but this is BMUF: to go on with another",
        ),
        (lambda state: state.pop("distributed"), "expected one of a BMUF"),
        (lambda state: state["distributed"].pop("kept"), r"the state lacks \['kept'\]"),
        (lambda state: state["distributed"]["kept"]["momentum"].pop("a"), r"momentum: only .* has .*'a'"),
        (lambda state: state["distributed"]["kept"]["anchor"].update(b=torch.zeros(3)), r"anchor: .*'b', \(3,\)"),
        (lambda state: state["distributed"]["kept"].pop("anchor"), "anchor: only the checkpoint, or only the model"),
        (lambda state: state["distributed"]["rates"].append(0.1), "2 parameter groups, the optimizer 1"),
    ],
)
def test_states_that_do_not_fit_change_nothing(quadratic, saved, change, says):
    state, _ = states(quadratic, saved, BMUF, 2, drained=False)[0]
    change(state)

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(BMUF, task, comm)
        before = everything(task, optimizer)
        if comm.rank == 0:
            with pytest.raises(ValueError, match=says):
                optimizer.load_state_dict(state)
        assert_same_bits(everything(task, optimizer), before)

    SimulatedWorld(2).run(body)


@pytest.mark.few(8)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_drained_state_goes_on_at_any_number_of_ranks(quadratic, saved, algorithm, size):
    """Everything but the wrapped optimizer's state is the same on all ranks."""
    drained = states(quadratic, saved, algorithm, 3, drained=True)
    (state, weights), *others = drained
    for other, theirs in others:
        assert_same_bits(tree(state["distributed"]["kept"]), tree(other["distributed"]["kept"]))
        assert_same_bits(tree(weights), tree(theirs))

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        kept = copy.deepcopy(optimizer.state_dict()["distributed"]["kept"])
        assert_same_bits(tree(kept), tree(state["distributed"]["kept"]))
        train(task, optimizer, range(5, STEPS))
        optimizer.finish()
        return task.flat()

    ends = SimulatedWorld(size).run(body)
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_another_number_of_ranks_needs_a_drained_state(quadratic, saved, algorithm):
    state, _ = states(quadratic, saved, algorithm, 2, drained=False)[0]

    def body(comm):
        optimizer = make(algorithm, quadratic(0), comm)
        with pytest.raises(ValueError, match=r"of 2 ranks, but there are 1 now: call drain\(\) before state_dict\(\)"):
            optimizer.load_state_dict(state)

    SimulatedWorld(1).run(body)


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gathered_state_goes_on_at_any_number_of_ranks_if_it_was_drained(quadratic, saved, algorithm, size, drained):
    gathered, weights = states(quadratic, saved, algorithm, 3, drained=drained, by="gathered_state_dict")[0]

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.model.load_state_dict(weights)
        if not drained:
            with pytest.raises(ValueError, match=rf"holds those of 3 ranks, but there are {size} now: call drain\(\)"):
                optimizer.load_state_dict(gathered)
            return torch.zeros(0)
        optimizer.load_state_dict(gathered)
        train(task, optimizer, range(5, STEPS))
        optimizer.finish()
        return task.flat()

    ends = SimulatedWorld(size).run(body)
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_rank_0s_model_for_everybody_is_noticed(quadratic, saved, algorithm):
    """A job that saves only rank 0's model, or loads before the optimizer is made, which copies rank 0's."""
    saves = states(quadratic, saved, algorithm, 2, drained=False)

    def body(comm):
        task = quadratic(comm.rank)
        task.model.load_state_dict(saves[comm.rank][1])
        optimizer = make(algorithm, task, comm)
        optimizer.load_state_dict(saves[comm.rank][0])
        if comm.rank == 1:
            task.backward(5)
            for use in (optimizer.state_dict, optimizer.step, optimizer.state_dict):
                with pytest.raises(
                    RuntimeError, match="not those that the loaded state was saved with: load this rank's"
                ):
                    use()

    SimulatedWorld(2).run(body)


def test_a_step_hashes_the_parameters_only_after_a_state_was_loaded(quadratic, algorithm, monkeypatch):
    """That would take longer than the step of a large model."""
    hashed = []
    monkeypatch.setattr(periodic, "digest", lambda named: hashed.append(digest(named)) or hashed[-1])

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(4))
        assert hashed == []
        optimizer.load_state_dict(optimizer.state_dict())
        train(task, optimizer, range(4, 8))
        return len(hashed)

    assert SimulatedWorld(1).run(body) == [1]


def test_a_plain_checkpoint_of_the_model_goes_in_and_out(quadratic, saved, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(7))
        with optimizer.averaged_model():
            exported = saved(task.model.state_dict())
        optimizer.finish()
        other = nn.ParameterDict({key: nn.Parameter(torch.zeros_like(p)) for key, p in task.model.items()})
        other.load_state_dict(exported)
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        begun = algorithm(plain, comm=comm, broadcast=False)  # alike on all ranks
        begun.finish()
        return torch.cat([p.detach().reshape(-1) for p in other.values()]), torch.cat(
            [exported[key].reshape(-1) for key in task.model]
        )

    for begun, exported in SimulatedWorld(3).run(body):
        torch.testing.assert_close(begun, exported)


@pytest.mark.parametrize("algorithm", [CoCoDSGD, EASGD, OverlapLocalSGD])
def test_what_is_under_way_is_stored_not_applied(quadratic, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(3))
        x = task.flat().clone()
        state = optimizer.state_dict()["distributed"]
        assert torch.equal(task.flat(), x)
        assert state["arrived"]["weight"] == comm.size
        mean = torch.cat([state["arrived"]["means"][key].reshape(-1) for key in task.model])
        optimizer.finish()
        return x, mean

    launched, means = zip(*SimulatedWorld(3).run(body), strict=True)
    for mean in means:
        torch.testing.assert_close(mean, torch.stack(launched).mean(0))


def test_loading_while_an_exchange_is_under_way(quadratic, saved):
    """It is waited for, and forgotten."""
    saves = states(quadratic, saved, OverlapLocalSGD, 2, drained=False, steps=2)

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(OverlapLocalSGD, task, comm)
        train(task, optimizer, range(3))
        optimizer.load_state_dict(saves[comm.rank][0])
        task.model.load_state_dict(saves[comm.rank][1])
        train(task, optimizer, range(2, 7))
        return everything(task, optimizer)

    def straight(comm):
        task = quadratic(comm.rank)
        optimizer = make(OverlapLocalSGD, task, comm)
        train(task, optimizer, range(7))
        return everything(task, optimizer)

    for one, other in zip(SimulatedWorld(2).run(body), SimulatedWorld(2).run(straight), strict=True):
        assert_same_bits(one, other)


class WithoutARate(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"size": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["size"])


def test_an_optimizer_without_a_learning_rate_goes_on(quadratic, saved):
    def body(comm, stop):
        task = quadratic(comm.rank)
        optimizer = make(LocalSGD, task, comm, inner=WithoutARate)
        task.train(optimizer, range(stop))
        weights, state = saved((task.model.state_dict(), optimizer.state_dict()))
        task = quadratic(comm.rank)
        optimizer = make(LocalSGD, task, comm, inner=WithoutARate)
        task.model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return task.train(optimizer, range(stop, STEPS))

    straight, resumed = (SimulatedWorld(3).run(partial(body, stop=stop)) for stop in (0, 5))
    assert all(map(torch.equal, straight, resumed))


@pytest.mark.parametrize("algorithm", [SlowMo, DiLoCo])
def test_vectors_may_be_cut_otherwise(quadratic, saved, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        train(task, optimizer, range(4))
        state = saved(optimizer.state_dict())
        other = make(algorithm, task, comm, bucket_bytes=20, broadcast=True)
        task.model.load_state_dict(task.model.state_dict())
        other.load_state_dict(state)
        assert_same_bits(tree(other.state_dict()["distributed"]["kept"]), tree(state["distributed"]["kept"]))

    SimulatedWorld(1).run(body)


def test_ranks_that_load_states_of_different_boundaries_are_told(algorithm, quadratic, saved):
    """As after a kill between two ranks' files; or where one rank has none."""

    def begun(comm):
        task = quadratic(comm.rank)
        states = []
        optimizer = make(algorithm, task, comm)
        for step in range(12):
            train(task, optimizer, range(step, step + 1))
            states.append(saved((task.model.state_dict(), optimizer.state_dict())))
        return states

    files = SimulatedWorld(2).run(begun)

    def resumed(comm, steps):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        if steps[comm.rank] is not None:
            weights, state = files[comm.rank][steps[comm.rank]]
            task.model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(task, optimizer, range(20, 30))

    for steps in ((4, 10), (7, None)):
        with pytest.raises(CollectiveError, match=r"after states of boundary . were loaded on all ranks"):
            SimulatedWorld(2).run(lambda comm, steps=steps: resumed(comm, steps))
