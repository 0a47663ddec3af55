"""DiLoCo's outer optimizer: any of torch's, its rate schedule, its state."""

from functools import partial

import pytest
import torch
from communicators import CollectiveError, Elastic, SimulatedWorld, allreduce
from local_sgd import DiLoCo, StreamingDiLoCo

pytestmark = pytest.mark.quick

STEPS = 13
OUTERS = {
    "plain": partial(torch.optim.SGD, lr=0.5),
    "adam": partial(torch.optim.AdamW, lr=0.05),
    "muon-like": partial(torch.optim.Adafactor, lr=0.05),  # depends on shapes
}


def decaying(outer):
    return torch.optim.lr_scheduler.ExponentialLR(outer, 0.8)


def make(task, comm, outer, **options):
    inner = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.5)
    return DiLoCo(inner, comm=comm, model=task.model, sync_every=3, outer=outer, **options)


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
@pytest.mark.parametrize("schedule", [None, decaying])
@pytest.mark.parametrize("bucket_bytes", [None, 20])
def test_it_is_the_optimizer_on_the_change(quadratic, outer, schedule, bucket_bytes):
    """In all bits, by hand: z in the model's shapes, Δ its gradient, the scheduler after every outer step."""

    def by_hand(comm):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.5)
        z = {name: torch.nn.Parameter(p.detach().clone()) for name, p in task.model.items()}
        optimizer = outer(list(z.values()))
        scheduler = schedule and schedule(optimizer)
        for step in range(STEPS):
            task.backward(step)
            inner.step()
            if (step + 1) % 3 == 0:
                for name, p in task.model.items():
                    z[name].grad = z[name].detach() - allreduce(p.detach(), comm, average=True, native=False)
                optimizer.step()
                if scheduler:
                    scheduler.step()
                for name, p in task.model.items():
                    p.data.copy_(z[name].data)
        return task.flat()

    def ours(comm):
        task = quadratic(comm.rank)
        optimizer = make(task, comm, outer, outer_scheduler=schedule, bucket_bytes=bucket_bytes)
        task.train(optimizer, range(STEPS))
        x = task.flat().clone()
        optimizer.finish()
        return x

    for x, expected in zip(SimulatedWorld(2).run(ours), SimulatedWorld(2).run(by_hand), strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("at", [1, 3, 8])
def test_resumed_with_its_state_and_schedule(quadratic, saved, at):
    def whole(comm, stop=None):
        task = quadratic(comm.rank)
        optimizer = make(task, comm, OUTERS["adam"], outer_scheduler=decaying)
        if stop is not None:
            task.train(optimizer, range(stop))
            state, weights = saved(optimizer.state_dict()), saved(task.model.state_dict())
            task = quadratic(comm.rank)
            optimizer = make(task, comm, OUTERS["adam"], outer_scheduler=decaying, bucket_bytes=20)
            task.model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        task.train(optimizer, range(stop or 0, STEPS))
        rate = optimizer.rule.outer.param_groups[0]["lr"]
        optimizer.finish()
        return task.flat(), rate, optimizer.rule.scheduler.last_epoch

    straight, resumed = SimulatedWorld(2).run(whole), SimulatedWorld(2).run(lambda comm: whole(comm, at))
    for (x, rate, steps), (y, *others) in zip(straight, resumed, strict=True):
        assert torch.equal(x, y)
        assert [rate, steps] == others
    assert straight[0][1] == pytest.approx(0.05 * 0.8**4)


def test_bad_outers(quadratic, saved):
    def body(comm):
        task = quadratic(comm.rank)
        with pytest.raises(TypeError, match=r"outer is or makes NoneType, expected a torch.optim.Optimizer"):
            make(task, comm, lambda parameters: None)
        with pytest.raises(TypeError, match=r"outer is or makes int, expected .*partial\(torch.optim.SGD, lr=0.7\)"):
            make(task, comm, 3)
        with pytest.raises(TypeError, match=r"outer_scheduler is 3, expected what makes a scheduler"):
            make(task, comm, OUTERS["adam"], outer_scheduler=3)
        for group, no_rounds in ((comm, lambda sent, comm: sent.indices), (Elastic(comm), lambda sent, comm: "a sum")):
            with pytest.raises(AttributeError) as error:
                make(task, group, OUTERS["adam"], allreduce=no_rounds)
            assert "allreduce=, without compress=, makes rounds" in error.value.__notes__[0]
        with pytest.raises(ValueError, match=r"the outer optimizer lacks \['c'\]"):
            make(task, comm, lambda parameters: torch.optim.SGD(parameters[:-1], lr=0.7))
        plain, scheduled = make(task, comm, OUTERS["adam"]), make(task, comm, OUTERS["adam"], outer_scheduler=decaying)
        with pytest.raises(ValueError, match="of an outer optimizer without a scheduler"):
            scheduled.load_state_dict(saved(plain.state_dict()))
        with pytest.raises(ValueError, match="of an outer optimizer with a scheduler"):
            plain.load_state_dict(saved(scheduled.state_dict()))

    SimulatedWorld(1).run(body)


def test_ranks_with_other_outers(quadratic):
    def body(comm):
        make(quadratic(comm.rank), comm, partial(torch.optim.SGD, lr=0.5 + comm.rank))

    with pytest.raises(CollectiveError, match=r"lr: 0.5.*lr: 1.5|lr: 1.5.*lr: 0.5"):
        SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    "options",
    [{}, {"native": True}, {"compress": "int8"}, {"kind": StreamingDiLoCo, "fragments": 2, "delay": 1}],
    ids=str,
)
def test_a_rate_that_one_rank_alone_changes_is_an_error_at_the_next_boundary(quadratic, options):
    """Anchors would part without a word."""

    def body(comm):
        task = quadratic(comm.rank)
        kind = options.get("kind", DiLoCo)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        chosen = {name: value for name, value in options.items() if name != "kind"}
        optimizer = kind(inner, comm=comm, model=task.model, sync_every=3, outer=OUTERS["plain"], **chosen)
        task.train(optimizer, range(6))
        rules = [optimizer.rule] if kind is DiLoCo else [fragment.rule for fragment in optimizer._driver.fragments]
        outers = [rule.outer for rule in rules]
        for outer in outers:
            outer.param_groups[0]["lr"] = 0.4  # on all ranks: nothing to complain of
        task.train(optimizer, range(6, 9))
        outers[-1].param_groups[0]["lr"] = 0.4 + 0.1 * comm.rank
        with pytest.raises(CollectiveError, match=r"(?s)lr: 0.4.*lr: 0.5"):
            task.train(optimizer, range(9, 15))

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("other", [None, torch.optim.lr_scheduler.ConstantLR])
def test_ranks_with_other_schedules_are_told(other):
    """Before their rates differ."""

    def body(comm):
        model = torch.nn.Linear(3, 2)
        schedule = other if comm.rank else torch.optim.lr_scheduler.LinearLR
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(CollectiveError, match="LinearLR"):  # noqa: PT012 - when it is made, or at a boundary
            optimizer = DiLoCo(inner, comm=comm, sync_every=1, outer_scheduler=schedule)
            for _ in range(3):
                inner.step()
                optimizer.average()

    SimulatedWorld(2).run(body)
