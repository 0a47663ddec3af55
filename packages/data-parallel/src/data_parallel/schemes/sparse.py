"""The sparse exchange: selections are summed; what is not sent, or is dropped on the way, waits in the residuals."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from communicators import Bucket, Communicator, Schedule, schedules
from sparse_collectives import ALGORITHMS, Algorithm, Reduction, resolve
from sparse_compress import ErrorFeedback, SparseVector, StatefulCompressor, TopK, all_finite, put
from torch import Tensor

from data_parallel.lanes import ERROR_STATE, Lane, Saved, Scheme, Sending, in_units
from data_parallel.nonfinite import first_nonfinite
from data_parallel.settings import Settings


class SparseScheme(Scheme):
    """Scheme that sends selections, with error feedback. An algorithm's own selection replaces the compressor.

    If TopK's k is all of a bucket's elements, as in a warm-up, they are summed dense, whatever the algorithm, because
    indices would double their bytes: on a wire of int8 in int8, what is rounded off waits, on others in full precision.

    algorithm: with its options and wire. wire: the wire's name. With nonfinite="skip", or elastic ranks, steps can be
    rolled back, at the cost of twice the memory.
    """

    def __init__(self, comm: Communicator, algorithm: Algorithm, settings: Settings, *, wire: str) -> None:
        super().__init__(comm, algorithm, selects=True, wire=wire)
        self.algorithm, self.compressor = algorithm, settings.compressor
        self.momentum, self.dense_below, self.tentative = settings.momentum, settings.dense_below, settings.undoes(comm)
        self.keeps = ERROR_STATE if self.momentum else ERROR_STATE[:1]

    def open(self, bucket: Bucket, saved: Saved) -> Lane:
        """Opens a bucket's lane. TypeError for float64 gradients on a wire of fewer bytes."""
        return SparseLane(self, bucket, saved)

    def state_dict(self) -> dict[str, Any]:
        """State of a stateful compressor, as a list, which torch.distributed.checkpoint loads as a whole."""
        if not isinstance(self.compressor, StatefulCompressor):
            return {}
        return {"compressor": list(self.compressor.state_dict().items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks the error state and the algorithm's states, and loads the compressor's."""
        if state["residuals"] and bool(state["velocities"]) != (self.momentum > 0):
            raise ValueError("the state was saved with another momentum setting: with momentum there are velocities")
        if ("compressor" in state) != isinstance(self.compressor, StatefulCompressor):
            raise ValueError(f"the state was saved with another compressor than {self.compressor}")
        for _, kept in state["algorithm_state"]:
            self.algorithm.check_state(kept)
        if isinstance(self.compressor, StatefulCompressor):
            self.compressor.load_state_dict(dict(state["compressor"]))


class SparseLane(Lane):
    """A bucket of which selected entries are sent."""

    def __init__(self, scheme: SparseScheme, bucket: Bucket, saved: Saved) -> None:
        super().__init__(bucket, saved)
        resolve(scheme.algorithm, wire=scheme.wire, dtype=torch.promote_types(bucket.dtype, torch.float32))
        if self.state is None:
            self.state = scheme.algorithm.initial_state()
        self._scheme = scheme
        self._feedback = ErrorFeedback(scheme.compressor, momentum=scheme.momentum, tentative=scheme.tentative)
        if saved.error_state:
            self._feedback.adopt(self.key, saved.error_state["residuals"], saved.error_state.get("velocities"))

    @property
    def residual(self) -> Tensor | None:
        """Residual, even of a step that may still be undone."""
        try:
            return self._feedback.residual(self.key)
        except KeyError:  # nothing has been sent yet
            return None

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """Selects from the accumulated gradient."""
        comm, compressor = self._scheme.comm, self._scheme.compressor
        algorithm = self._scheme.algorithm.fitted(comm.size) if comm.elastic else self._scheme.algorithm
        gradient = flat if scale == 1.0 else in_units(flat, scale)
        k = compressor.entries(flat.numel())
        select = algorithm.select(gradient, comm.rank, comm.size, k, self.state) if algorithm.prescribes else None
        sent, culprit = self._feedback.compress(self.key, gradient, select=select, withhold=unused), -1
        if self._feedback.is_suspect(self.key):
            sent, culprit = self._spoiled(sent, self._feedback.residual(self.key))
        dense = k >= sent.numel and isinstance(compressor, TopK)
        facts = algorithm.facts(f"numel={sent.numel}", f"{sent.dtype}", f"k={k}", state=self.state)
        if dense and self._scheme.wire.startswith("int8"):
            schedule = _summed_in_int8(sent, comm.rank, comm.size)
        else:
            schedule = ALGORITHMS["dense"].call(sent, comm, k) if dense else algorithm.call(sent, comm, k, self.state)
        return Sending(f"{facts} summed dense" if dense else facts, schedule, flat, scale, unused, lambda: culprit)

    def values(self, result: Reduction) -> tuple[Tensor, Tensor]:
        """The values of both vectors."""
        return result.total.values, result.dropped.values

    def receive(self, sending: Sending, result: Reduction) -> tuple[Tensor, Tensor]:
        """The mean: scaled, and in the gradient's own dtype, which may overflow."""
        self._feedback.restore(self.key, result.dropped)
        mean = (result.total.values / self._scheme.comm.size * sending.scale).to(sending.flat.dtype)
        return put(sending.flat, result.total.indices, mean), mean

    def commit(self) -> None:
        """Keeps this step's error state and algorithm state."""
        self._feedback.commit()
        self._before = None

    def rollback(self) -> None:
        """Restores both from before the step."""
        self._feedback.rollback()
        super().rollback()

    def error_state(self) -> dict[str, Tensor]:
        """Residual and velocity: references."""
        kept = self._feedback.state_dict()
        return {what: kept[what][self.key] for what in self._scheme.keeps if self.key in kept[what]}

    def _spoiled(self, sent: SparseVector, residual: Tensor) -> tuple[SparseVector, int]:
        """The entries to send where something that has accumulated is not finite, and its first such element.

        All values sent are NaN then, whatever was selected: so it shows in the total, however an algorithm cuts, rounds
        and compares. The step is lost anyway; to save later ones, the parameters in question lose their whole residual,
        even its finite values, which beside an inf may be just as far off.
        """
        accumulated = residual.index_add(0, sent.indices, sent.values)
        culprit = first_nonfinite(accumulated)
        spans = [span for span in self.spans if not bool(all_finite(accumulated[span]))]
        self._feedback.drop(self.key, spans)
        return SparseVector(sent.indices, torch.full_like(sent.values, torch.nan), sent.numel), culprit


def _summed_in_int8(sent: SparseVector, rank: int, size: int) -> Schedule[Reduction]:
    """Dense sum of all elements."""
    rounded = yield from schedules.quantised_allreduce(sent.values, rank, size)
    total, dropped = (SparseVector(sent.indices, values, sent.numel) for values in rounded)
    return Reduction(total, dropped)
