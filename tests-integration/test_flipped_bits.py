"""One flipped bit of one rank's parameter is an error on every rank, with rank, parameter and time, in every training.

DDP's hook and HSDP: `ddp_states.py`, `hsdp_cases.py`.
"""

from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from local_sgd import ALGORITHMS
from partial_collectives import EagerSGD, PartialAllreduce
from sparse_collectives import sparse_allreduce
from sparse_compress import ErrorFeedback, TopK

pytestmark = pytest.mark.quick

SHAPES = {"first": (3, 2), "second": (5,), "halves": (4,), "doubles": (2, 2)}
DTYPES = {"halves": torch.bfloat16, "doubles": torch.float64}
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
STEPS, EVERY = 8, 2

AT_EVERY_STEP = {
    "gtopk": partial(DistributedOptimizer, density=0.3, momentum=0.5),
    "overlap": partial(DistributedOptimizer, density=0.3, overlap=True, bucket_bytes=16),
    "dense": partial(DistributedOptimizer, algorithm="dense"),
    "powersgd": partial(DistributedOptimizer, algorithm="powersgd", options={"rank": 1, "dense_steps": 2}),
    "updates": partial(UpdateOptimizer, density=0.3),
}
ROUNDS = partial(PartialAllreduce, quorum="majority")
AT_BOUNDARIES = {
    **ALGORITHMS,
    "int8": partial(ALGORITHMS["local-sgd"], compress="int8"),
    "sparse diloco": lambda inner, **given: ALGORITHMS["diloco"](
        inner,
        compress=ErrorFeedback(TopK(0.3)),
        allreduce=lambda sparse, comm: sparse_allreduce(sparse, comm, k=sparse.indices.numel()),
        **given,
    ),
    "native": partial(ALGORITHMS["local-sgd"], native=True),
    "rounds": partial(ALGORITHMS["diloco"], allreduce=ROUNDS),
    "streaming rounds": partial(ALGORITHMS["streaming-diloco"], allreduce=ROUNDS, fragments=2),
}


class Model(torch.nn.Module):
    """Parameters of several dtypes, whose gradients do not depend on them, so that flips stay where they are."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            x = torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.float32))
            setattr(self, name, torch.nn.Parameter(x))

    def backward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        sums = [(p * torch.randn(p.shape, generator=generator)).sum().float() for p in self.parameters()]
        torch.stack(sums).sum().backward()


def flip(tensor, bit):
    """Flips a bit, counted over all elements."""
    words = tensor.detach().view(-1).view(WORDS[tensor.element_size()])
    width = 8 * tensor.element_size()
    element, place = divmod(bit % (words.numel() * width), width)
    words[element] ^= -(1 << place) if place == width - 1 else 1 << place


def inner_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.125)


flips = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 4),
        "name": st.sampled_from(list(SHAPES)),
        "bit": st.integers(0, 10_000),
        "at": st.integers(1, STEPS - 1),
    }
)


def outcomes(size, body, flipped):
    """Outcome of `body` on every rank: (None, what it has seen), or (error, …); flipped["rank"] mod size flips."""
    errors, all_seen = [None] * size, [[] for _ in range(size)]

    def on_rank(comm):
        model, seen = Model(), all_seen[comm.rank]

        def before_step(step):
            if flipped is not None and step == flipped["at"] and comm.rank == flipped["rank"] % size:
                flip(getattr(model, flipped["name"]), flipped["bit"])

        try:
            body(comm, model, before_step, seen)
        except CollectiveError as error:
            errors[comm.rank] = str(error)
            raise

    with suppress(CollectiveError):
        SimulatedWorld(size).run(on_rank)
    return list(zip(errors, all_seen, strict=True))


def bits_of(model):
    return [p.detach().view(-1).view(torch.uint8).tolist() for p in model.parameters()]


def synchronous(comm, model, before_step, seen, *, make, verify):
    optimizer = make(inner_of(model), model.named_parameters(), comm=comm, verify=verify)
    for step in range(STEPS):
        before_step(step)
        optimizer.zero_grad()
        with getattr(optimizer, "ahead", nullcontext)():
            model.backward(100 * comm.rank + step)
        optimizer.step()
        seen.append(bits_of(model))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", AT_EVERY_STEP)
@settings(max_examples=max(3, settings.default.max_examples // 3))
@given(size=st.sampled_from([2, 3, 5]), flipped=flips, verify=st.integers(1, 3))
def test_replicas_of_a_synchronous_training(kind, size, flipped, verify):
    """An error if, and only if, the bits differ where they are compared: a step may round a flipped bit away."""
    alone = outcomes(size, partial(synchronous, make=AT_EVERY_STEP[kind], verify=0), flipped)
    found = outcomes(size, partial(synchronous, make=AT_EVERY_STEP[kind], verify=verify), flipped)
    said = {error for error, _ in found}
    assert len(said) == 1
    if any(error for error, _ in alone):  # such as a NaN in an update
        assert f"rank {flipped['rank'] % size}" in said.pop()
        return
    seen = [bits for _, bits in alone]
    due = [step for step in range(verify - 1, STEPS, verify) if any(bits[step] != seen[0][step] for bits in seen)]
    if not due:
        assert said == {None}
        return
    (error,) = said
    assert f"replicas differ after step {due[0] + 1}: " in error
    if size == 2:
        assert f"hashes of '{flipped['name']}' are " in error
    else:
        assert f"rank {flipped['rank'] % size} in '{flipped['name']}', against most of the {size} ranks" in error
    assert due[0] < flipped["at"] + verify


def averaging(comm, model, before_step, seen, *, make, verify):
    with make(inner_of(model), comm=comm, model=model, sync_every=EVERY, verify=verify) as optimizer:
        for step in range(STEPS):
            before_step(step)
            model.zero_grad()
            model.backward(100 * comm.rank + step)
            optimizer.step()
            optimizer.average()
            seen.append(None)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", AT_BOUNDARIES)
@settings(max_examples=max(3, settings.default.max_examples // 3))
@given(size=st.sampled_from([2, 3, 5]), flipped=flips, verify=st.integers(1, 3))
def test_parameters_at_rest_of_a_periodic_training(kind, size, flipped, verify):
    found = outcomes(size, partial(averaging, make=AT_BOUNDARIES[kind], verify=verify), flipped)
    (error,) = {error for error, _ in found}
    rank, name = flipped["rank"] % size, flipped["name"]
    refused = (
        f"the average is not finite in '{name}'; NaN or inf in the parameters of ranks [{rank}]"  # before it is due
    )
    assert error is not None
    assert f"rank {rank} in '{name}' after step {flipped['at']}" in error or refused in error
    assert all(len(seen) < flipped["at"] + EVERY * verify + 1 for _, seen in found)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", [*AT_EVERY_STEP, *AT_BOUNDARIES])
@settings(max_examples=max(2, settings.default.max_examples // 5))
@given(size=st.sampled_from([1, 2, 3, 5]), verify=st.sampled_from([None, 0, 1, 2]))
def test_no_false_alarm(kind, size, verify):
    """Parameters of both zeros and of NaNs with payloads are bits like others."""
    body, make = (synchronous, AT_EVERY_STEP) if kind in AT_EVERY_STEP else (averaging, AT_BOUNDARIES)
    assert {error for error, _ in outcomes(size, partial(body, make=make[kind], verify=verify), None)} == {None}


KEPT = {name: make for name, make in ALGORITHMS.items() if name not in ("local-sgd", "cocod")}
KEPT["streaming-diloco"] = partial(KEPT["streaming-diloco"], delay=0)  # with a delay the mean comes first, and rounds


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KEPT)
@settings(max_examples=max(3, settings.default.max_examples // 3))
@given(size=st.sampled_from([2, 3, 5]), rank=st.integers(0, 4), bit=st.integers(0, 10_000), place=st.integers(0, 9))
def test_anchors_and_momenta(kind, size, rank, bit, place):
    """State that ranks share is compared before the next boundary changes it."""

    def body(comm, model, before_step, seen):
        optimizer = KEPT[kind](inner_of(model), comm=comm, model=model, sync_every=EVERY, verify=1)
        for step in range(STEPS):
            if step == 3 and comm.rank == rank % size:
                parts = optimizer._driver.parts
                kept = [part[name] for part in parts for name in optimizer.rule.kept]
                flip(kept[place % len(kept)], bit)
            model.zero_grad()
            model.backward(100 * comm.rank + step)
            optimizer.step()
            optimizer.average()

    found = outcomes(size, body, None)
    (error,) = {error for error, _ in found}
    assert error is not None
    assert "replicas differ at boundary " in error
    assert (f"rank {rank % size} in " in error) == (size > 2)


def test_what_goes_wrong_amid_a_step_is_not_told():
    """The limit: on ranks that are apart it looks like any other step, and the mean takes it up."""

    def body(comm, model, before_step, seen):
        optimizer = ALGORITHMS["local-sgd"](inner_of(model), comm=comm, model=model, sync_every=EVERY, verify=1)
        for _ in range(EVERY):
            model.zero_grad()
            model.backward(comm.rank)
            if comm.rank == 1:
                flip(model.second.grad, 22)
            optimizer.step()
            optimizer.average()

    assert [error for error, _ in outcomes(3, body, None)] == [None] * 3


def eager(comm, model, before_step, seen, *, verify):
    optimizer = EagerSGD(inner_of(model), model.named_parameters(), comm=comm, verify=verify)
    with optimizer:
        for step in range(STEPS):
            before_step(step)
            model.zero_grad()
            model.backward(100 * comm.rank + step)
            optimizer.step()
            if step % EVERY:
                optimizer.synchronize()
                seen.append(bits_of(model))
        optimizer.synchronize()
        seen.append(bits_of(model))


@given(size=st.sampled_from([2, 3, 5]), flipped=flips, verify=st.integers(1, 2))
def test_replicas_of_eager_sgd(size, flipped, verify):
    alone = outcomes(size, partial(eager, verify=None), flipped)
    found = outcomes(size, partial(eager, verify=verify), flipped)
    (error,) = {error for error, _ in found}
    seen = [bits for _, bits in alone]
    meetings = range(verify - 1, len(seen[0]), verify)
    if not any(bits[meeting] != seen[0][meeting] for meeting in meetings for bits in seen):
        assert error is None
        return
    assert error is not None
    assert "replicas differ after " in error
    assert f"'{flipped['name']}'" in error
    assert (f"rank {flipped['rank'] % size} in " in error) == (size > 2)


@pytest.mark.parametrize("kind", ["rounds", "streaming rounds"])
def test_anchors_of_rounds_are_compared_at_the_end(kind):
    """Each rank has its own, into which it applies rounds by itself: what goes wrong there is no write at rest."""

    def body(comm):
        model = Model()
        optimizer = AT_BOUNDARIES[kind](inner_of(model), comm=comm, model=model, sync_every=EVERY, verify=1)
        for step in range(STEPS):
            model.zero_grad()
            model.backward(100 * comm.rank + step)
            optimizer.step()
            optimizer.average()
        if comm.rank == 1:
            optimizer._driver.parts[0]["anchor"][0] += 1
        optimizer._driver.at_rest.forget()
        with pytest.raises(CollectiveError, match=r"at the end of .*: rank 1 in 'anchor of first'"):
            optimizer.finish()

    SimulatedWorld(3).run(body)
