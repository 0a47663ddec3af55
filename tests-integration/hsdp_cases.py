"""FSDP2 inside nodes and the sparse exchange between them, for on_ranks.py at four ranks: two nodes of two.

Gradients are integers, and so exact: what all nodes gave is what was applied plus what waits in the residuals.
"""

from __future__ import annotations

import io
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from communicators import CollectiveError
from data_parallel import DistributedOptimizer, reshard_residuals, sparse_hsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard


class Layer(nn.Module):
    """Σ ⟨p, g⟩: the gradient of p is g, exactly. 7 rows on two ranks: one of them is padded."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(7, 5)), nn.Parameter(torch.zeros(6))

    def forward(self, given, before):
        return before + (self.weight * given[0]).sum() + (self.bias * given[1]).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.head = nn.Parameter(torch.zeros(9))

    def forward(self, given):
        before = (self.head * given[2]).sum()
        return self.second(given[1], self.first(given[0], before))


def gradients_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        [torch.randint(-9, 10, shape, generator=generator).float() * 2 for shape in ((7, 5), (6,))] for _ in range(2)
    ] + [torch.randint(-9, 10, (9,), generator=generator).float() * 2]


LOW_RANK = {"algorithm": "powersgd", "options": {"dense_steps": 1}}


class Run:
    def __init__(self, *, dense=False, mp=None, **settings):
        names = ("between", "inside")
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        self.model = Model()
        if dist.get_rank() >= 2:  # nodes begin apart
            nn.init.ones_(self.model.head)
        options = {"mp_policy": mp} if mp else {}
        for module in (self.model.first, self.model.second, self.model):
            fully_shard(module, mesh=self.mesh if dense else self.mesh["inside"], **options)
        if not dense:
            selects = settings.get("algorithm") not in ("dense", "powersgd")
            density = {"density": 0.2} if selects else {}
            self.state = sparse_hsdp(self.model, self.mesh["between"], **{**density, **settings})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.given, self.applied = {}, {}

    def backward(self, step, spoil=None):
        gradients = gradients_of(step, dist.get_rank())
        if spoil is not None:
            gradients[1][0].view(-1)[spoil] = torch.nan
        self.model(gradients).backward()

    def step(self, step, backwards=1, forwards=1):
        """forwards: of the model before a backward, as of a siamese one."""
        self.optimizer.zero_grad()
        for micro in range(backwards):
            given = [gradients_of(10 * step + micro + 5 * twice, dist.get_rank()) for twice in range(forwards)]
            sum(map(self.model, given)).backward()
            for twice in range(forwards):
                self.count(10 * step + micro + 5 * twice)
        for name, p in self.model.named_parameters():
            self.applied[name] = self.applied.get(name, 0) + p.grad.full_tensor()
        self.optimizer.step()

    def count(self, step):
        """The means over all ranks, which a dense exchange would have given."""
        every = [gradients_of(step, rank) for rank in range(4)]
        for i, layer in enumerate(("first", "second")):
            for j, name in enumerate(("weight", "bias")):
                self._add(f"{layer}.{name}", [g[i][j] for g in every])
        self._add("head", [g[2] for g in every])

    def _add(self, name, gradients):
        self.given[name] = self.given.get(name, 0) + torch.stack(gradients).mean(0)

    def residuals(self):
        """Of all ranks, as they belong to whole parameters: the mean over the nodes."""
        own = self.state.state_dict()["distributed"]["residuals"]
        total = {}
        for name, p in self.model.named_parameters():
            padded = own[name].clone()
            dist.all_reduce(padded, group=self.mesh["between"].get_group())
            parts = [torch.empty_like(padded) for _ in range(2)]
            dist.all_gather(parts, padded, group=self.mesh["inside"].get_group())
            total[name] = torch.cat(parts)[: p.shape[0]] / 2
        return total

    def check_conservation(self):
        kept = self.residuals()
        for name, given in self.given.items():
            assert torch.equal(given, self.applied[name] + kept[name]), name

    def bits(self):
        own = self.state.state_dict()["distributed"]
        tensors = [p.to_local().detach().clone() for p in self.model.parameters()]
        return tensors + [t.clone() for part in ("residuals", "velocities") for _, t in sorted(own[part].items())]


def nothing_is_lost():
    for settings in ({}, {"algorithm": "spardl"}, {"algorithm": "oktopk"}, {"dense_below": 7}, {"nonfinite": "skip"}):
        run = Run(**settings)
        for step in range(5):
            run.step(step, backwards=1 + step % 2, forwards=1 + step // 3)
        run.check_conservation()
        assert any(bool(kept.any()) for kept in run.residuals().values())


def as_torchs_own_where_all_is_sent():
    own, torchs = Run(algorithm="dense"), Run(dense=True)
    whole, half = Run(density=1.0), Run(density=1.0, mp=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    for step in range(4):
        for run in (own, whole, half, torchs):
            run.step(step, backwards=2, forwards=1 + step % 2)
    for run in (own, whole, half):
        for name, _ in torchs.model.named_parameters():
            assert torch.equal(run.applied[name], torchs.applied[name]), name
            assert torch.equal(dict(run.model.named_parameters())[name].full_tensor(), -run.applied[name])


def a_step_begins_though_gradients_of_another_optimizer_stand():
    """None began after the first one: schedules stood still, and nothing was committed."""
    run = Run()
    part = torch.optim.SGD(run.model.first.parameters(), lr=1.0)
    for step in range(3):
        part.zero_grad()
        run.backward(step)
        part.step()
    assert run.state.stats()["steps"] == 3


def exchanges_go_on_during_backward():
    run, under_way = Run(), []
    gradients = gradients_of(0, dist.get_rank())
    gradients[0][1] = gradients[0][1].requires_grad_()
    gradients[0][1].register_hook(lambda _: under_way.append(len(run.state._pending)))
    run.model(gradients).backward()
    assert len(under_way) == 1
    assert under_way[0] > 0  # of a layer whose backward is over, while another's runs
    assert not run.state._pending


def a_nan_on_one_rank_is_an_error_on_all():
    for spoil in (3, 33):  # in the part of the first, of the second rank of a node
        run = Run()
        run.step(0)
        with pytest.raises(CollectiveError, match=r"rank 1: the gradient of 'second\.weight' is not finite"):
            run.backward(1, spoil if dist.get_rank() == 2 else None)
        run.step(2)  # all ranks go on


def no_nan_stays_after_the_error():
    """Nothing of the gradient that spoiled the step waits: the residual is as before it, or begins anew."""
    for settings in ({"momentum": 0.5}, {"algorithm": "oktopk"}, LOW_RANK, {"dense_below": 7}):
        run = Run(**settings)
        run.step(0)
        before = run.state.state_dict()["distributed"]["residuals"]["second.weight"].clone()
        run.optimizer.zero_grad()
        spoiled = dist.get_rank() == 2
        with pytest.raises(CollectiveError, match=r"rank 1: the gradient of 'second\.weight' is not finite"):
            run.backward(1, slice(None) if spoiled else None)
        assert all(bool(tensor.isfinite().all()) for tensor in run.bits()), settings
        kept = run.state.state_dict()["distributed"]["residuals"]["second.weight"]
        assert dist.get_rank() < 2 or not bool(kept.any()) or torch.equal(kept, before)
        run.step(2)
        run.step(3)
        assert all(bool(tensor.isfinite().all()) for tensor in run.bits()), settings


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("broken on the way back")


def break_off(run, step):
    """Backward ends in an exception when the second layer's gradients are under way."""
    run.optimizer.zero_grad()
    gradients = gradients_of(step, dist.get_rank())
    gradients[0][1] = Breaks.apply(gradients[0][1].requires_grad_())
    with pytest.raises(ValueError, match="broken on the way back") as held:
        run.model(gradients).backward()
    return held


def a_backward_that_breaks_off_is_over():
    """Its state can be saved, nothing of it stays, and all goes on once FSDP does; till then that is an error."""
    run = Run(nonfinite="skip", momentum=0.5)
    run.step(0)
    before = run.bits()
    held = break_off(run, 1)
    assert all(map(torch.equal, run.bits(), before))  # a state_dict, too
    assert all(p.grad is None for p in run.model.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call reset_iter_state\(\) of its root module"):
            run.backward(2)
    del held  # till now the exception, with all that it refers to, was there
    if not hasattr(run.model, "reset_iter_state"):  # before torch 2.13 FSDP has no way back
        return
    run.model.reset_iter_state()
    run.applied, run.given = {}, {}
    again = Run(nonfinite="skip", momentum=0.5)
    again.step(0)
    break_off(again, 1)
    again.model.reset_iter_state()
    for step in range(3, 6):
        again.step(step)  # a backward is the first that hears of it
        run.step(step)
    assert all(map(torch.equal, run.bits(), again.bits()))


def the_settings_are_said_and_fixed():
    run = Run(momentum=0.5, clip_norm=2.0, verify=3)
    said, place = repr(run.state), dist.get_rank()
    assert said.startswith("HsdpState(algorithm='gtopk', compressor=TopK(")
    assert "momentum=0.5, clip_norm=2.0, nonfinite='raise', verify=3" in said
    assert said.endswith(f", node {place // 2} of 2, rank {place % 2} of 2 in it)")
    for name in ("momentum", "skipped"):
        with pytest.raises(AttributeError, match=f"{name} of HsdpState is fixed"):
            setattr(run.state, name, 0.9)
    for settings, kind in (({"clip_norm": 0.0}, ValueError), ({"verify": 1.5}, TypeError)):
        with pytest.raises(kind, match=next(iter(settings))):
            Run(**settings)


def stats_count_bytes_and_steps():
    run, dense = Run(nonfinite="skip"), Run(algorithm="dense")
    for step in range(3):
        run.step(step)
        dense.step(step)
    run.optimizer.zero_grad()
    run.backward(3, 33 if dist.get_rank() == 2 else None)
    stats, whole = run.state.stats(), dense.state.stats()
    assert (stats["steps"], stats["skipped"], whole["skipped"]) == (4, 1, 0)
    assert stats["density"] == 0.2
    assert whole["density"] == 1
    assert 0 < stats["bytes_sent"] <= run.state.comm.bytes_sent
    elements = sum(part.numel() for part in run.state.state_dict()["distributed"]["residuals"].values())
    assert whole["bytes_dense"] == 3 * 4 * elements  # two nodes: as many bytes as a part has
    kept = run.state.state_dict()["distributed"]["residuals"].values()
    assert stats["residual_norm"] == pytest.approx(float(torch.cat([t.view(-1) for t in kept]).norm()))
    assert stats["seconds_exchanging"] >= stats["seconds_waited"] >= 0
    place = dist.get_rank()
    assert (stats["rank"], stats["ranks"], stats["part"]) == (place, 4, place % 2)
    checked = Run(verify=1)
    checked.step(0)
    digests = [None] * 4
    dist.all_gather_object(digests, checked.state.stats()["verified_hash"])
    assert digests[:2] == digests[2:]  # the same part on both nodes


def clip_norm_holds_each_nodes_gradient():
    """Nodes have the same gradients here, far longer than the limit, so that the mean is just as long."""
    run, whole = Run(algorithm="dense", clip_norm=0.5), Run(algorithm="dense", clip_norm=1e9)
    plain = Run(algorithm="dense")
    for each in (run, whole, plain):
        each.model(gradients_of(0, dist.get_rank() % 2)).backward()
    squares = sum(float(p.grad.full_tensor().square().sum()) for p in run.model.parameters())
    assert squares**0.5 == pytest.approx(0.5 * 2**0.5)
    for one, other in zip(whole.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


def verify_finds_nodes_that_came_apart():
    """One bit of one part on one rank: an error on every rank of every node, with ranks as all ranks count them."""
    run = Run(verify=2)
    for step in range(3):
        run.step(step)
    if dist.get_rank() == 3:
        with torch.no_grad():
            run.model.second.weight.to_local().view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    run.optimizer.zero_grad()
    with pytest.raises(
        CollectiveError, match=r"before step 4: .*second\.weight.* on rank 1, .* on rank 3, and without"
    ):
        run.backward(3)


def gathered_of(run):
    """The first rank's file, as every rank reads it."""
    states = [run.state.gathered_state_dict()]
    assert bool(states[0]) == (dist.get_rank() == 0)
    dist.broadcast_object_list(states)
    return saved(states[0])


def one_file_of_all_ranks_resumes_with_the_same_bits():
    whole, second = Run(momentum=0.5), Run(momentum=0.5)
    for step in range(5):
        if step == 2:
            gathered = gathered_of(whole)
            second.state.load_state_dict(gathered)
            second.model.load_state_dict(whole.model.state_dict())
        whole.step(step)
        if step >= 2:
            second.step(step)
            assert all(map(torch.equal, whole.bits(), second.bits())), step
    place = gathered["distributed"]["ranks"][dist.get_rank() % 2]
    with pytest.raises(TypeError, match="a gathered state of sparse_hsdp"):
        reshard_residuals(gathered, 2)
    half = reshard_residuals(place, 1)[0]["distributed"]  # for one node
    mine = own_of(whole, gathered)["distributed"]
    for name, kept in half["residuals"].items():
        other = mine["residuals"][name].clone()
        dist.all_reduce(other, group=whole.mesh["between"].get_group())
        assert torch.equal(kept, other / 2)
    if dist.get_rank() == 3:
        whole.state._exchange.commit_or_rollback = None  # nothing can be had of this rank
    with pytest.raises(CollectiveError if dist.get_rank() < 3 else TypeError):
        whole.state.gathered_state_dict()


def own_of(run, gathered):
    """This rank's part of a file."""
    return gathered["distributed"]["ranks"][dist.get_rank() % 2]["distributed"]["ranks"][dist.get_rank() // 2]


def clipping_behind_the_exchange_is_said_once():
    run = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(16):  # of which three are looked at
            run.optimizer.zero_grad()
            run.backward(step)
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
            run.optimizer.step()
    found = [str(one.message) for one in caught if "scaled down" in str(one.message)]
    assert len(found) == 1, found
    assert "sparse_hsdp(..., clip_norm=...)" in found[0]


def a_nan_on_one_rank_is_skipped_on_all():
    run = Run(nonfinite="skip", momentum=0.5)
    run.step(0)
    before = run.bits()
    run.optimizer.zero_grad()
    run.backward(1, 33 if dist.get_rank() == 2 else None)
    assert run.state.skipped == 1
    assert all(p.grad is None for p in run.model.parameters())
    run.optimizer.step()
    assert all(map(torch.equal, run.bits(), before))
    run.step(2)
    assert run.state.skipped == 1
    assert not all(map(torch.equal, run.bits(), before))


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume_has_the_same_bits():
    for settings in ({"momentum": 0.5}, {"algorithm": "spardl"}, {"algorithm": "oktopk"}, LOW_RANK):
        whole, second = Run(**settings), Run(**settings)
        for step in range(6):
            if step == 3:
                second.state.load_state_dict(saved(whole.state.state_dict()))
                second.model.load_state_dict(whole.model.state_dict())
            whole.step(step)
            if step >= 3:
                second.step(step)
                assert all(map(torch.equal, whole.bits(), second.bits())), (settings, step)
    states = [None] * 4
    dist.all_gather_object(states, whole.state.state_dict())
    for other, reason in ((dist.get_rank() ^ 1, "inside a node"), (dist.get_rank() ^ 2, "every rank saves and loads")):
        with pytest.raises(ValueError, match=reason):
            second.state.load_state_dict(states[other])


def what_would_be_wrong_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    with pytest.raises(ValueError, match="no module of this model is sharded: call fully_shard"):
        sparse_hsdp(Model(), mesh["between"])
    both = Model()
    fully_shard(both, mesh=mesh)
    with pytest.raises(ValueError, match="sums whole gradients between nodes by itself"):
        sparse_hsdp(both, mesh["between"])
    with torch.device("meta"):
        empty = Model()
    fully_shard(empty, mesh=mesh["inside"])
    with pytest.raises(ValueError, match=r"on the meta device, which have no values: .*; to_empty\(\) and initialise"):
        sparse_hsdp(empty, mesh["between"])
    partly = Model()
    fully_shard(partly.first, mesh=mesh["inside"])
    with pytest.raises(ValueError, match=r"nobody would exchange them: \['head', 'second.weight'"):
        sparse_hsdp(partly, mesh["between"])
    fully_shard(partly.second, mesh=mesh["inside"])
    fully_shard(partly, mesh=mesh["inside"])
    for settings, reason in (({"algorithm": "auto"}, "name one"), ({"nonfinite": "pass"}, "'raise' or 'skip'")):
        with pytest.raises(ValueError, match=reason):
            sparse_hsdp(partly, mesh["between"], **settings)
    older = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    for model in (partly, older(Model()), older(Model(), use_orig_params=True)):
        with pytest.raises(TypeError, match=r"are DTensors, or those of FullyShardedDataParallel.* sparse_hsdp"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())


WRONG_MESHES = [  # of the model and its first layer, of its second, between; and what the error says
    ("inside", "inside", "inside", r"between has the ranks \[(0, 1|2, 3)\], of which \[\d, \d\] share"),
    ("between", "between", "between", r"between has the ranks \[(0, 2|1, 3)\], of which \[\d, \d\] share"),
    ("inside", "inside", "all", r"between has the ranks \[0, 1, 2, 3\], of which \[(0, 1|2, 3)\] share"),
    ("all", "all", "between", r"between has the ranks \[(0, 2|1, 3)\], of which \[\d, \d\] share"),
    ("inside", "between", "between", r"'1' is sharded over the ranks \[\d, \d\], but '0' over \[(0, 1|2, 3)\]"),
    ("inside", "inside", "both", r"between is a DeviceMesh of 2 dimensions \('between', 'inside'\), expected one"),
]


def a_wrong_mesh_is_refused_before_anything_is_written():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    meshes = {"between": mesh["between"], "inside": mesh["inside"], "both": mesh}
    meshes["all"] = init_device_mesh("cpu", (4,))
    for most, second, between, reason in WRONG_MESHES:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # all parts are of one size
        for module, its in ((model[0], most), (model[1], second), (model, most)):
            fully_shard(module, mesh=meshes[its])
        for p in model.parameters():
            nn.init.constant_(p, dist.get_rank())
        given = dist.group.WORLD if between == "all" else meshes[between]
        with pytest.raises(ValueError, match=reason):
            sparse_hsdp(model, given, density=0.2)
        assert all(bool((p.to_local() == dist.get_rank()).all()) for p in model.parameters())


def nodes_whose_ranks_are_in_another_order_are_refused():
    """Rank 3 stands in the place of 0, and 2 in that of 1: each would get another part's parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    model = Model()
    fully_shard(model, mesh=mesh["inside"])
    with pytest.raises(ValueError, match=r"rank \d has place (0 of 2 .* place 1|1 of 2 .* place 0) of 2"):
        sparse_hsdp(model, crossed[dist.get_rank() in (1, 2)], density=0.2)


def a_second_call_on_one_model_is_refused():
    run = Run()
    with pytest.raises(ValueError, match="module '' has an all-reduce hook already"):
        sparse_hsdp(run.model, run.mesh["between"], density=0.2)
    for step in range(3):
        run.step(step)
    run.check_conservation()


def nothing_of_a_step_is_kept_after_the_next():
    run = Run()
    for step in range(4):
        run.step(step)
        assert 0 < len(run.state._exchange.tally._step) <= 3  # of three modules


def a_bad_match_of_optimizer_is_said_once():
    adam, sgd = torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)
    told = [
        (adam, {"density": 0.05}, "AdamW behind a sparse exchange.*or algorithm=.dense."),
        (adam, {"momentum": 0.9}, "AdamW"),
    ]
    silent = [(adam, {"algorithm": "dense"}), (sgd, {})]
    for kind, settings, said in [
        *told,
        (sgd, {"momentum": 0.9}, "momentum is on twice"),
        *((*one, "") for one in silent),
    ]:
        run = Run(**settings)
        run.optimizer = kind(run.model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                run.step(step)
        found = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
        assert len(found) == bool(said), found
        assert all(re.search(said, one) for one in found), found


LAWS = [
    a_step_begins_though_gradients_of_another_optimizer_stand,
    no_nan_stays_after_the_error,
    a_backward_that_breaks_off_is_over,
    the_settings_are_said_and_fixed,
    stats_count_bytes_and_steps,
    clip_norm_holds_each_nodes_gradient,
    verify_finds_nodes_that_came_apart,
    one_file_of_all_ranks_resumes_with_the_same_bits,
    clipping_behind_the_exchange_is_said_once,
    a_wrong_mesh_is_refused_before_anything_is_written,
    nodes_whose_ranks_are_in_another_order_are_refused,
    a_second_call_on_one_model_is_refused,
    a_bad_match_of_optimizer_is_said_once,
    nothing_of_a_step_is_kept_after_the_next,
    nothing_is_lost,
    as_torchs_own_where_all_is_sent,
    exchanges_go_on_during_backward,
    a_nan_on_one_rank_is_an_error_on_all,
    a_nan_on_one_rank_is_skipped_on_all,
    resume_has_the_same_bits,
    what_would_be_wrong_is_refused,
]
SELDOM = [
    no_nan_stays_after_the_error,
    a_bad_match_of_optimizer_is_said_once,
    nothing_of_a_step_is_kept_after_the_next,
    as_torchs_own_where_all_is_sent,
    stats_count_bytes_and_steps,
    a_backward_that_breaks_off_is_over,
    resume_has_the_same_bits,
]
