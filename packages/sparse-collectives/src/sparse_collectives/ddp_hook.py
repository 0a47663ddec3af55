"""A communication hook for DistributedDataParallel: sparse allreduce in two lines of a training script.

state = SparseHookState(density=0.01, algorithm="gtopk", momentum=0.9)
ddp.register_comm_hook(state, sparse_hook)
"""

# No `from __future__ import annotations`: DDP looks at the hook's annotations as objects.

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from communicators import Bucket, Schedule, Work, as_communicator, start
from communicators.dense import allreduce
from sparse_compress import Compressor, ErrorFeedback, StatefulCompressor, TopK
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it, but not for type checkers

from sparse_collectives.algorithms import algorithm_named
from sparse_collectives.allreduce import prepare
from sparse_collectives.auto import AUTO, Choice, choose_for_training, refuse_options
from sparse_collectives.checkpoint import KEY, PARTS, check_place, refuse_residuals, split
from sparse_collectives.dense_wire import DenseWire, dense_wire
from sparse_collectives.nonfinite import finite
from sparse_collectives.parameters import check_pairs
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State
from sparse_collectives.suspects import first_nonfinite, marked, suspect_element
from sparse_collectives.wire import wire_named


class SparseHookState:
    """What `sparse_hook` keeps between steps: residuals and momenta by parameter, and the algorithm's own state.

    process_group: the one that the DDP module uses, default the default group. The state cannot see DDP's: with another
        group the means are over that one's ranks. Every rank makes the state at the same point.
    density: the share of each bucket's elements that a rank sends; `compressor` in its place for another selection.
    algorithm: a name in `ALGORITHMS`, or "auto": measures the ranks now, and takes what is predicted to be fastest for
        the module's `named_parameters`, which it needs; `choice` then says what and why.
    options: the algorithm's own settings, such as {"teams": 2} for "spardl"; "auto" chooses them too.
    wire: how values travel: "fp32"; fewer bytes for selections, see `WIRES`, where what is rounded off stays in the
        residual; for "dense" "bf16" or "fp16", where it is lost.
    momentum: DGC's correction before the selection; then give the optimizer none (see the README).
    grad_scaler: the GradScaler of mixed-precision training. Residuals are then kept unscaled, and a step that it
        skips leaves them as they were, bit for bit, for twice their memory; one optimizer for all parameters, because
        the scaler skips by optimizer. Without a scaler, a gradient that is not finite is an error on every rank that
        names rank and parameter. As DDP raises what a hook raises, it comes out of backward() as a RuntimeError that
        holds the CollectiveError's text, and training ends there: the communicator is of no use afterwards.
    named_parameters: of the module, so that errors and checkpoints name parameters; without them they are numbered in
        the order in which DDP first brings them, and a new state is no template for torch.distributed.checkpoint.

    DDP may cut its buckets anew (it does after the first step): residuals follow their parameters. A parameter whose
    gradient is all zeros on this rank (unused) is left out of the selection, and its residual waits, because DDP
    throws the result away where it is unused on all ranks.

    What a backward brings is sent sooner or later, also where the training loop throws the gradient away, such as the
    generator's loss in the discriminator of a GAN. Freeze what must not learn with requires_grad_(False) meanwhile.

    With find_unused_parameters, accumulating over several backwards needs no_sync() in all but the last: a parameter
    that no rank used in this one may still bring an old gradient, and DDP throws away what is selected of it.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        density: float = 0.01,
        algorithm: str = "gtopk",
        options: Mapping[str, Any] | None = None,
        wire: str = "fp32",
        momentum: float = 0.0,
        grad_scaler: torch.amp.GradScaler | None = None,
        compressor: Compressor | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler is {grad_scaler!r}, expected the GradScaler itself, or None without one")
        self.comm = as_communicator(process_group)
        self.compressor = compressor if compressor is not None else TopK(density)
        self.choice: Choice | None = None
        named = list(named_parameters)
        check_pairs(named)
        if algorithm == AUTO:
            refuse_options(options)
            parameters = [p for _, p in named]
            self.choice = choose_for_training(parameters, self.comm, self.compressor, momentum=momentum, wire=wire)
            algorithm, options, wire = self.choice.algorithm, self.choice.options, self.choice.wire
        self.algorithm, self.entry = algorithm, algorithm_named(algorithm, options, size=self.comm.size)
        if momentum and not self.entry.compresses:
            raise ValueError(f"{algorithm} selects nothing, so momentum={momentum} belongs into the optimizer")
        self.wire = wire
        self._dense_wire = DenseWire() if self.entry.compresses else dense_wire(wire)
        if self.entry.compresses:
            wire_named(wire)  # a wrong one is an error now
        self.grad_scaler = grad_scaler
        self._feedback = ErrorFeedback(self.compressor, momentum=momentum, tentative=grad_scaler is not None)
        self._names = [name for name, _ in named]
        self._parameters = dict(named)
        self._positions = {id(p): position for position, (_, p) in enumerate(named)}
        self._buckets: dict[str, Bucket] = {}  # by the name of their first member
        self._pool: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}  # of no bucket yet, by parameter
        self._states: dict[str, State] = {}
        self._states_before: dict[str, State] = {}
        self._scale = 1.0  # of this step: a GPU is asked for it once
        self._finite: list[Tensor] = []  # of this step, by bucket, 0-D bool, read at its end

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and momenta by parameter, and the algorithm's state by bucket.

        Another one on every rank. Loadable by torch.load(weights_only=True).
        With `named_parameters` a new state has zeros for every parameter that learns, so that it is a complete
        template for torch.distributed.checkpoint, which loads only what it finds there; without them a new state is
        empty, and nothing would be loaded. DCP merges equal keys of the ranks, so the key holds the rank:
        dcp.save({f"hook {rank}": state}), dcp.load({f"hook {rank}": state}).
        """
        self._settle()
        own: dict[str, Any] = {
            "rank": self.comm.rank,
            "world_size": self.comm.size,
            "algorithm": self.algorithm,
            "algorithm_state": list(self._states.items()),  # a list without tensors, which DCP loads as a whole
        }
        if isinstance(self.compressor, StatefulCompressor):
            own["compressor"] = self.compressor.state_dict()
        return {KEY: {**own, **self._by_parameter()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict` was taken.

        Raises ValueError, before anything is changed, for one of another rank or world size (`reshard_residuals`
        first), and for residuals that the module has no parameters for, or that a dense sum has no use for. Without
        `named_parameters` residuals that are left over are an error in the second step.
        """
        own = check_place(state_dict, self.comm.rank, self.comm.size)
        if not self.entry.compresses:
            refuse_residuals(own["residuals"])
            own = {**own, **{part: {} for part in PARTS}}
        if shapes := {name: p.shape for name, p in self._parameters.items()}:
            wrong = {n: tuple(t.shape) for n, t in own["residuals"].items() if shapes.get(n) != t.shape}
            if wrong:
                raise ValueError(f"residuals of parameters that the module does not have, or in other shapes: {wrong}")
        pool = {part: {name: tensor.clone() for name, tensor in own[part].items()} for part in PARTS}
        if pool["residuals"] and bool(pool["velocities"]) != (self._feedback.momentum > 0):
            raise ValueError("the state was saved with another momentum setting: with momentum there are velocities")
        if ("compressor" in own) != isinstance(self.compressor, StatefulCompressor):
            raise ValueError(f"the state was saved with another compressor than {self.compressor}")
        if isinstance(self.compressor, StatefulCompressor):
            self.compressor.load_state_dict(own["compressor"])
        self._pool, self._buckets, self._finite = pool, {}, []
        self._feedback = ErrorFeedback(
            self.compressor, momentum=self._feedback.momentum, tentative=self.grad_scaler is not None
        )
        self._states = copy.deepcopy(dict(own["algorithm_state"])) if own["algorithm"] == self.algorithm else {}

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Starts the exchange of one bucket; the future holds the mean in the bucket's own buffer."""
        if bucket.index() == 0:
            self._settle()
            self._scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        flat = bucket.buffer()
        _refuse_sparse(flat)
        key = self._bucket_key(bucket.parameters(), flat)
        scale = self._scale
        gradient = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if not self.entry.compresses:
            return self._sum(key, gradient).get_future().then(lambda mean: flat.copy_(mean.wait()))
        work = self._launch(key, gradient / scale if scale != 1.0 else gradient)

        def put_back(future: torch.futures.Future[Reduction]) -> Tensor:
            reduction = future.wait()
            self._feedback.restore(key, reduction.dropped)
            # As the optimizer will see it: scaled, and in the gradient's own dtype, which may overflow.
            mean = (reduction.total.values / self.comm.size * scale).to(flat.dtype)
            if self.grad_scaler is not None:
                self._finite.append(torch.isfinite(mean).all())
            return flat.zero_().index_copy_(0, reduction.total.indices.long(), mean)

        return work.get_future().then(put_back)

    def _launch(self, key: str, gradient: Tensor) -> Work[Reduction]:
        """Selects from what has accumulated and starts the sum."""
        bucket, k = self._buckets[key], self.compressor.entries(gradient.numel())
        rank, size = self.comm.rank, self.comm.size
        state, select = self._states.get(key), self.entry.select
        prescribed = None if select is None else select(gradient, rank, size, k, state)
        unused = unused_spans(bucket, gradient)
        sent = marked(self._feedback.compress(key, gradient, select=prescribed, withhold=unused), self._feedback, key)
        schedule, facts = prepare(sent, self.comm, k, self.algorithm, self.entry.options, state, self.wire)
        if self.grad_scaler is None:
            residual = self._feedback.residual(key)
            schedule = finite(
                schedule,
                lambda reduction: reduction.total.values,
                lambda: suspect_element(sent, residual),
                *(bucket, self._names, rank, size),
            )
        return start(schedule, self.comm, facts=f"{facts} in a DDP hook", device=gradient.device)

    def _sum(self, key: str, gradient: Tensor) -> Work[Tensor]:
        """Without a selection: starts the mean of whole gradients, by our schedule."""
        rank, size = self.comm.rank, self.comm.size
        schedule = mean_of(gradient, rank, size, self._dense_wire)
        if self.grad_scaler is None:
            suspect = partial(first_nonfinite, gradient)
            schedule = finite(schedule, lambda total: total, suspect, self._buckets[key], self._names, rank, size)
        facts = f"dense(numel={gradient.numel()}, {gradient.dtype}, wire={self.wire}) in a DDP hook"
        return start(schedule, self.comm, facts=facts, device=gradient.device)

    def _settle(self) -> None:
        """Ends the last step: with a GradScaler it stands only if every bucket was finite, alike on every rank."""
        if self._buckets and (left := sorted(self._pool["residuals"])):
            raise ValueError(f"residuals were loaded for parameters that DDP does not bring: {left}")
        if not self._finite or bool(torch.stack(self._finite).all()):
            self._feedback.commit()
        else:
            self._feedback.rollback()
            self._states = self._states_before
        self._finite, self._states_before = [], copy.deepcopy(self._states)

    def _bucket_key(self, parameters: list[Tensor], flat: Tensor) -> str:
        """The name of the bucket; if its parameters were cut otherwise before, their residuals move here."""
        members = tuple(self._position(p) for p in parameters)
        _refuse_complex([self._names[m] for m, p in zip(members, parameters, strict=True) if p.is_complex()])
        shapes, strides = tuple(p.shape for p in parameters), tuple(map(_strides_in_bucket, parameters))
        bucket = Bucket(members, shapes, flat.dtype, flat.device, strides)
        key = self._names[members[0]]
        if self._buckets.get(key) != bucket:
            self._move_to(key, bucket)
        return key

    def _position(self, parameter: Tensor) -> int:
        if id(parameter) not in self._positions:
            self._positions[id(parameter)] = len(self._names)
            self._names.append(f"parameter {len(self._names)}")
        return self._positions[id(parameter)]

    def _move_to(self, key: str, bucket: Bucket) -> None:
        for old_key, old in list(self._buckets.items()):
            if set(old.members) & set(bucket.members):
                kept = self._feedback.forget(old_key) if self.entry.compresses else {}
                for part, flat in kept.items():
                    self._pool[part].update(split({old_key: flat}, self._buckets, self._names))
                del self._buckets[old_key]
                for states in (self._states, self._states_before):  # both, so that a rollback knows these buckets
                    states.pop(old_key, None)
        self._buckets[key] = bucket
        if self.entry.initial_state is not None:
            for states in (self._states, self._states_before):
                states.setdefault(key, self.entry.initial_state())
        residual, velocity = (self._out_of_pool(bucket, part) for part in PARTS)
        if residual is not None:
            self._feedback.adopt(key, residual, velocity)

    def _out_of_pool(self, bucket: Bucket, part: str) -> Tensor | None:
        """The members' residuals or velocities as one flat tensor, zeros where there is none; None without any."""
        found: list[Tensor | None] = [None] * len(self._names)
        for member, shape in zip(bucket.members, bucket.shapes, strict=True):
            tensor = found[member] = self._pool[part].pop(self._names[member], None)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{part} of {self._names[member]!r}: {tuple(tensor.shape)}, expected {tuple(shape)}")
        if all(tensor is None for tensor in found):
            return None
        dtype = torch.promote_types(bucket.dtype, torch.float32)
        return bucket.gather(found, out=torch.empty(bucket.numel, dtype=dtype, device=bucket.device))

    def _by_parameter(self) -> dict[str, dict[str, Tensor]]:
        kept = self._feedback.state_dict()
        found = {part: {**self._pool[part], **split(kept[part], self._buckets, self._names)} for part in PARTS}
        if self.entry.compresses and not found["residuals"]:
            found["residuals"] = self._zeros()
            found["velocities"] = self._zeros() if self._feedback.momentum else {}
        return found

    def _zeros(self) -> dict[str, Tensor]:
        """Of the parameters that learn: what a state that DDP has brought nothing yet has of them."""
        return {
            name: torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            for name, p in self._parameters.items()
            if p.requires_grad
        }


def sparse_hook(state: SparseHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: `ddp.register_comm_hook(state, sparse_hook)`. Backward goes on while buckets are exchanged."""
    if not isinstance(state, SparseHookState):
        raise TypeError(f"state is {state!r}: use ddp.register_comm_hook(SparseHookState(...), sparse_hook)")
    return state.exchange(bucket)


def mean_of(gradient: Tensor, rank: int, size: int, wire: DenseWire) -> Schedule[Tensor]:
    """The mean over ranks of whole gradients."""
    total = yield from allreduce(wire.given(gradient, size), rank, size)
    return wire.mean(total, size, gradient.dtype)


def unused_spans(bucket: Bucket, flat: Tensor) -> list[slice]:
    """Where members lie whose gradient is all zeros. Most are seen not to be at their first elements."""
    edges = pairwise(accumulate((shape.numel() for shape in bucket.shapes), initial=0))
    spans = [slice(*edge) for edge in edges]
    if not flat.is_cpu:  # one look for all of them, because each waits for the device
        used = torch.stack([flat[span].any() for span in spans]).tolist()
        return [span for span, any_used in zip(spans, used, strict=True) if not any_used]
    return [span for span in spans if not flat[span][:64].any() and not flat[span].any()]


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays its gradient into a bucket: as the parameter lies in memory if that has no gaps, else row by row."""
    dense = torch.empty_like(parameter, device="meta")  # keeps the strides exactly where there are no gaps
    return dense.stride() if dense.stride() == parameter.stride() else dense.contiguous().stride()


def _refuse_sparse(flat: Tensor) -> None:
    if flat.layout != torch.strided:
        raise TypeError(f"a gradient has layout {flat.layout}, expected a dense one: for an embedding use sparse=False")


def _refuse_complex(names: list[str]) -> None:
    if names:
        raise TypeError(
            f"complex parameter {names[0]!r}: give DDP its real view, nn.Parameter(torch.view_as_real(p)), and take "
            "torch.view_as_complex of that in forward"
        )
