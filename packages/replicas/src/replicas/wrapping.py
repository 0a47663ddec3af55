"""An optimizer round another one: schedulers, scalers and checkpoints take it for an optimizer, which it is."""

import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from communicators import Communicator, as_communicator, run, schedules
from torch import Tensor, nn
from torch.optim import Optimizer

from replicas.averaging import broadcast_parameters, broadcast_tensors
from replicas.loading import wholly
from replicas.parameters import check_buffers, described, named_of, trained_of
from replicas.process_group import refuse_alone, warn_of_ddp
from replicas.replaced import ReplacedParameters
from replicas.states import STATE_KEY, check_saved_by, gathered_state, saved_by, state_of_rank
from replicas.unlike import refuse_unlike
from replicas.wrapped_state import check_loaded, load_into, refuse_torch_helpers, saved_optimizer

logger = logging.getLogger("replicas")


class Wrapping(Optimizer):
    """Base class of optimizers that wrap another one on several ranks.

    It shares param_groups, state and defaults with the optimizer that it wraps, so that either may be asked.
    GradScaler treats it as any optimizer: it unscales the gradients, and leaves out `step` where it found an inf.

        class Synchronous(Wrapping):
            def __init__(self, optimizer, named_parameters, comm=None):
                super().__init__(optimizer, named_parameters, comm)
                self.start_alike("")

            def step(self, closure=None):
                self.check_step()
                self.check_exchange()
                average_tensors([p.grad for p in self.trained.values()], self.comm, facts="Synchronous")
                self.optimizer.step()

    Args:
        optimizer: Optimizer over the live parameters, and no wrapper; where two are made of one, the last one counts.
        named_parameters: Parameters of the model, as `model.named_parameters()` gives them; None: those of `model`
            or, without it, the optimizer's, by its own names or numbers.
        comm: The ranks, see `communicators.as_communicator`.
        model: Module of the parameters, or None; looked through for DDP, which is not seen round it.
        what: Name in errors; default: the class's.

    Attributes:
        optimizer: Wrapped optimizer.
        named: Parameters by name, frozen ones too.
        trained: Parameters by name that are exchanged: neither frozen nor empty.
        advice: Remedy, in errors, for a state of another number of ranks; class attribute.
        alike: Whether the wrapped optimizer's state is the same on all ranks.
        meets_first: Whether a newcomer to an elastic group meets the others, by `regrouped`, before it has their state,
            which it takes over in `enter` while they go on.
        instead_of_ddp: Further remedy where DDP exchanges gradients too; class attribute.
        settles: Call after which all ranks hold the model, such as "drain()"; "" where they do after every step; class
            attribute.
        instead_of_shards: Remedy where parameters are sharded; class attribute.

    Raises:
        TypeError: The optimizer is none or wraps one, a parameter is sharded, or the names are as
            `check_named_parameters` refuses.
        ValueError: Parameters and optimizer do not fit, or nothing can be trained.
    """

    advice: ClassVar[str] = "go on with as many ranks"
    alike: bool = False
    meets_first: bool = False
    instead_of_ddp: ClassVar[str] = ""
    settles: ClassVar[str] = ""
    instead_of_shards: ClassVar[str] = "give whole parameters, as DistributedDataParallel or a plain module has them"

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        comm: Any = None,
        *,
        model: nn.Module | None = None,
        what: str = "",
    ) -> None:
        self.what = what or type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer to wrap")
        if not isinstance(model, nn.Module | None):
            raise TypeError(f"model is {model!r}, expected a torch.nn.Module, or None")
        self._trains = model if named_parameters is None else None  # all of this module
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        if isinstance(optimizer, Wrapping):
            raise TypeError(
                f"optimizer is {optimizer._a_wrapper}, and a wrapper takes no other, because both would exchange: give "
                f"{self.what} what that wraps, {optimizer.what}.optimizer"
            )
        named = named_of(optimizer, named_parameters)
        if sharded := [n for n, p in named.items() if hasattr(p, "to_local") or getattr(p, "_fsdp_flattened", False)]:
            raise TypeError(
                f"parameters {sharded} are DTensors, or those of FullyShardedDataParallel, of which each rank holds "
                f"another part: {self.instead_of_shards}"
            )
        self._given, self._comm = comm, as_communicator(comm)
        self._given_state: Mapping[str, Any] | None = None
        self._took_over = self._admits = False
        trained = trained_of(named, self.what)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.named, self.trained = optimizer, named, trained
        self._kinds = _kinds(trained)
        self._share()
        optimizer.register_load_state_dict_post_hook(partial(_share_again, weakref.ref(self)))
        self._replaced, self._apart, self._used = ReplacedParameters(trained, self.what), [0], False
        optimizer._wrapping = weakref.ref(self)  # type: ignore[attr-defined]  # the last one made
        self._successors: list[weakref.ref[Wrapping]] = []
        if self._comm.rank == 0:  # once is enough
            weakref.finalize(self, _tell, self._apart, self.what)
        warn_of_ddp(trained, model, comm, self._comm, owner=self.what, instead=self.instead_of_ddp)

    def tell_of_ddp(self, ddp: nn.Module) -> None:
        """Warns of a DDP module that exchanges these gradients too, and came round them after the constructor.

        Args:
            ddp: Module in whose forward the parameters are used.
        """
        warn_of_ddp(self.trained, ddp, self._given, self._comm, owner=self.what, instead=self.instead_of_ddp)

    @property
    def comm(self) -> Communicator:
        """Communicator of all ranks."""
        return self._comm

    @property
    def superseded(self) -> bool:
        """Whether another wrapper has been made of the same optimizer since."""
        return self.optimizer._wrapping() not in (None, self)  # type: ignore[attr-defined]

    @property
    def overtaken(self) -> bool:
        """Whether another wrapper has been made since of all of these parameters, or of a part of them alone."""
        return any(successor() is not None for successor in self._successors)

    def _overtake(self) -> list["Wrapping"]:
        """Wrappers so far whose parameters are all among these, or have all of these among them; they make way."""
        mine = set(map(id, self.trained.values()))
        with _LOCK:
            others = [(other, set(map(id, other.trained.values()))) for other in _ALL if other is not self]
        found = [other for other, theirs in others if mine <= theirs or theirs <= mine]
        for other in found:
            other._make_way()
        return found

    def _make_way(self) -> None:
        """Puts parameters where all ranks have them, before another wrapper begins with them."""

    def start_alike(self, settings: str, *, model: nn.Module | None = None, broadcast: bool = True) -> None:
        """Gives all ranks rank 0's parameters, and buffers of `model`; for every rank to call, in the constructor.

        Args:
            settings: Text of the settings that ranks must share.
            model: Module that has buffers.
            broadcast: Whether to copy; False: ranks compare a hash of their parameters instead.

        Raises:
            CollectiveError: On all ranks: they differ in settings, in names or shapes or, without `broadcast`, in the
                bits of parameters.
            ValueError: A buffer cannot be copied into.
        """
        if broadcast and model is not None:
            check_buffers(model)
        overtaken = self._overtake()
        self._alike = f"{self.what}({settings}, {described(self.named)})"
        self._model = model
        self._comm.claim(self, anew=True)
        if self._comm.newcomer if self.meets_first else self._comm.joining:
            if not self.meets_first:
                self._take_over()
        else:
            self._admits = True  # of at_least ranks some may die in here
            self._comm.atomic(partial(self._copy if broadcast else self._compare, settings))
        for other in overtaken:  # what is refused overtakes nothing
            other._successors.append(weakref.ref(self))
        with _LOCK:
            _ALL.add(self)

    @property
    def _buffers(self) -> list[Tensor]:
        return [] if self._model is None else list(self._model.buffers())

    def _copy(self, settings: str) -> None:
        broadcast_parameters(self.named, self._comm, what=self.what, settings=settings)
        buffers = [buffer for buffer in self._buffers if buffer.numel()]
        broadcast_tensors(buffers, self._comm, facts=f"buffers of {self.what}")

    def _compare(self, settings: str) -> None:
        facts = f"{self.what}({settings}, broadcast=False)"
        run(schedules.barrier(self._comm.rank, self._comm.size), self._comm, facts=facts)
        refuse_unlike(self.named, self._comm)

    def let_in(self, *, at_once: bool = False) -> None:
        """Opens an elastic group for ranks that come and go, at the end of a step; every rank calls it there.

        Args:
            at_once: No step of this rank's follows. Else what comes before the next one, as a metric or a checkpoint of
                all ranks, is still done by those who have taken this one, and a scheduler's step is in a newcomer's
                state.
        """
        self._comm.claim(self)
        self._admits = True
        if at_once or self._comm.leaving:
            self._let_in()

    def admit(self) -> bool:
        """Lets ranks come and go, once at the beginning and after `let_in`; returns whether the group has changed.

        Called when the next step begins; an `Elastic` calls it before that, when it deals the next batch.
        """
        changed = False
        while self._let_in():
            changed = True
            if not self._comm.leaving:
                self.regrouped()
        return changed

    def regrouped(self) -> None:
        """Follows a change of the group, between two steps of every rank; newcomers come to it, too."""

    def part(self) -> None:
        """Leaves what `regrouped` has opened with the others, at once: they do not wait for this rank any more."""

    def _let_in(self) -> bool:
        if not self._admits:
            self._comm.serve(self._for_newcomer)
            return False
        self._admits = False
        return self._comm.boundary(self._for_newcomer)

    def shared_state(self) -> dict[str, Any]:
        """State besides parameters and wrapped optimizer that a newcomer to an elastic group gets from this rank."""
        return {}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from another rank's `shared_state`; nothing of what that rank keeps for itself is in it."""

    @property
    def enters(self) -> bool:
        """Whether this is a newcomer to an elastic group whose constructor has not come to `enter` yet."""
        return self._given_state is not None or self._comm.newcomer

    def enter(self) -> None:
        """Ends the constructor: a newcomer to an elastic group goes on from the state that another rank gave."""
        if self._comm.newcomer:
            self._take_over()
        given, self._given_state = self._given_state, None
        if given is not None:
            load_into(self.optimizer, check_loaded(given["wrapped"], given["held"]))
            self.load_shared_state(given["own"])
            torch.set_rng_state(given["generator"])
            self._took_over = True

    def refuse_to_load(self) -> None:
        """Refuses a checkpoint on a newcomer to an elastic group, which has the others' state, and leaves them.

        Raises:
            RuntimeError: This is such a newcomer, before its first exchange.
        """
        if self._took_over:
            self._comm.close()
            raise RuntimeError(
                "this rank has come to a running training, and has the state of those who train: load a checkpoint "
                "only where world.newcomer is False, asked before the optimizer is made"
            )

    def _for_newcomer(self) -> dict[str, Any]:
        wrapped, held = saved_optimizer(self.optimizer, stepped=True)
        return {
            "alike": self._alike,
            "parameters": {name: p.detach() for name, p in self.named.items()},
            "buffers": self._buffers,
            "wrapped": wrapped,
            "held": held,
            "own": self.shared_state(),
            "generator": torch.get_rng_state(),
        }

    def _take_over(self) -> None:
        """Takes parameters and buffers that another rank gives; the rest waits for `enter`."""
        while (given := self._comm.take()) is None:
            self.part()
            self._comm.join_anew()
            self.regrouped()
        if given["alike"] != self._alike:
            self._comm.close()
            raise ValueError(
                f"this rank has come to a training with other settings or another model: that is {given['alike']}, "
                f"this one {self._alike}; start it as those who train were started"
            )
        own = [*self.named.values(), *self._buffers]
        with torch.no_grad():
            for tensor, value in zip(own, [*given["parameters"].values(), *given["buffers"]], strict=True):
                tensor.copy_(value)
        self._given_state = given

    def check_step(self, *, apart: bool = False) -> None:
        """Checks, at the beginning of a step, that it would train what the model uses.

        Args:
            apart: Whether ranks may hold different parameters from this step on, until `end_steps`.

        Raises:
            ValueError: A module has replaced parameters.
            RuntimeError: torch's get_state_dict takes this step, and would throw away what it sends; or another
                wrapper, made later, steps the wrapped optimizer.
        """
        if all(_is_zero(group.get("lr", 0.0)) for group in self.param_groups):  # as those helpers set it
            refuse_torch_helpers(self.what)
        self._refuse_others()
        self._apart[0] += apart and self._comm.size > 1

    def check_exchange(self) -> None:
        """Checks, before ranks exchange, that ranks and parameters are those of the beginning.

        Raises:
            RuntimeError: No comm was given, and a process group has been made since; or another wrapper, made later,
                steps the wrapped optimizer.
            ValueError: Parameters were frozen, unfrozen, added, replaced or converted since.
        """
        self._refuse_others()
        if self._given is None and self._comm.size == 1:
            refuse_alone(self._a_wrapper)
        self._refuse_changes()
        self._took_over = False  # from now on it is one of them

    def end_steps(self) -> None:
        """Notes that all ranks hold the same, or that this rank's state was saved.

        Steps that are apart and came since then are logged when this optimizer is collected, or at exit, unless after
        an exception: ranks with as many steps each that forget to finish would part in silence.
        """
        self._apart[0] = 0

    def state_with(self, own: Mapping[str, Any], *, stepped: bool) -> dict[str, Any]:
        """The wrapped optimizer's state with an own part, for `state_dict`.

        Args:
            own: Plain values and tensors.
            stepped: Whether the wrapped optimizer has taken a step.
        """
        refuse_torch_helpers(self.what)
        wrapped, held = saved_optimizer(self.optimizer, stepped=stepped)
        place = saved_by(self._comm.rank, self._comm.size, self.advice)
        return {**wrapped, STATE_KEY: {**place, **own, "wrapped": held}}

    @contextmanager
    def loading(self, state: Any) -> Iterator[None]:
        """Context of `load_state_dict`: an error leaves this optimizer, and what it wraps, as they were.

        Args:
            state: State that is loaded.

        Raises:
            TypeError: It is no state.
            ValueError: In place of whatever a malformed state brings about.
            RuntimeError: It cannot be loaded now.
        """
        refuse_torch_helpers(self.what)
        self.refuse_to_load()
        with wholly(self, self.what, state):
            yield

    def parts_of_state(
        self, state: Mapping[str, Any], needs: Sequence[str], *, anyones: str = ""
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parts of a state, inside `loading`: the wrapped optimizer's, to be given to it, and the own one.

        Args:
            state: Result of `state_dict` on this rank, or of `gathered_state_dict` on rank 0.
            needs: Keys that the own part must have.
            anyones: Key of the own part that is True where a state is good for any rank of any number.

        Raises:
            TypeError: It is no state.
            ValueError: The state is of another rank or number of ranks, or lacks something.
        """
        rank, size = self._comm.rank, self._comm.size
        state = state_of_rank(state, rank, size, advice=self.advice, anyones=anyones)
        if (saved := state.get(STATE_KEY, {})).get(anyones) is True:
            rank, size = saved.get("rank"), saved.get("world_size")
        own = check_saved_by(state, rank, size, of=self._a_wrapper, needs=needs, advice=self.advice)
        return check_loaded({key: held for key, held in state.items() if key != STATE_KEY}, own.get("wrapped")), own

    def gathered_state_dict(self) -> dict[str, Any]:
        """States of all ranks in one, for a checkpoint that rank 0 alone writes; every rank calls it.

        Rank 0 gets it, in the CPU's memory; others get {}. Every rank loads it by `load_state_dict`, which takes its
        own part. The wrapped optimizer's state is in it once where it is the same on all ranks. The result can be
        loaded by torch.load(weights_only=True).

        Raises:
            CollectiveError: `state_dict` raises on another rank, which is named.
        """
        comm, advice, alike = self._comm, self.advice, self.alike
        return comm.atomic(lambda: gathered_state(self.state_dict, comm, advice=advice, alike=alike))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is made; later every rank would have to agree on what is exchanged.

        Raises:
            RuntimeError: The optimizer has been made.
        """
        if "optimizer" in self.__dict__:
            raise RuntimeError(
                f"parameters cannot be added to a {self.what}: {self.settles and f'call {self.settles}, '}"
                f"add the group to the wrapped optimizer, and make a new {self.what} of it"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copy and pickle, which would make an optimizer of other parameters than the model's, or of none."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save its state_dict(), make another one, and load "
            "that there"
        )

    @property
    def _a_wrapper(self) -> str:
        return f"{'an' if self.what[0] in 'AEIOU' else 'a'} {self.what}"

    def _refuse_others(self) -> None:
        """Raises for other parameters in the model, and for a later wrapper round the optimizer that is in use."""
        self._replaced.refuse()
        last, self._used = self.optimizer._wrapping(), True  # type: ignore[attr-defined]
        if last is not None and last is not self and last._used:
            raise RuntimeError(
                f"{self._a_wrapper} of an optimizer that {last._a_wrapper}, made later, steps now: both would "
                "exchange; use one of them, on every rank, and make it anew to go back to it"
            )

    def _refuse_changes(self) -> None:
        """Raises ValueError where what the optimizer would step is no longer what is exchanged.

        A parameter that is not exchanged would be stepped with the gradient of each rank alone; one that was frozen
        would still be moved, by the mean of the others' residuals, momentum and weight decay.
        requires_grad counts, not only a gradient, because ranks that made the same change must all raise.
        """
        before, now = self._kinds, _kinds(self.trained)
        if other := [name for name in now if now[name] != before[name]]:
            raise ValueError(
                f"{len(other)} parameters have other dtypes or shapes than when this {self.what} was made of them, as "
                f"{other[0]!r}, {before[other[0]]} before and {now[other[0]]} now: convert the model first, then make "
                f"optimizer and {self.what}, on every rank"
            )
        known = {id(p) for p in self.trained.values()}
        strangers = [
            (g, p)
            for g, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if id(p) not in known and p.numel() and (p.requires_grad or p.grad is not None)
        ]
        first = (
            f"set requires_grad back (False, and grad None, of what is not exchanged), call {self.settles} on every "
            "rank, which keeps what all have done, set it anew, and"
        )
        remedy = (
            f"{first if self.settles else 'before the next backward'} make a new {self.what} of the wrapped one, "
            "optimizer.optimizer, on every rank: that one's state stays, what was kept beside it begins anew"
        )
        if strangers:
            names = {id(p): name for name, p in self.named.items()}
            added = [names.get(id(p), f"(group {g}, shape {tuple(p.shape)})") for g, p in strangers]
            raise ValueError(
                f"parameters of the optimizer that have a gradient, or would get one, but are not exchanged: {added}; "
                f"they were unfrozen, or added to the wrapped optimizer, later: {remedy}"
            )
        model = {} if self._trains is None else dict(self._trains.named_parameters())
        if added := [name for name, p in model.items() if p.requires_grad and p.numel() and id(p) not in known]:
            raise ValueError(
                f"the model has trainable parameters that the optimizer does not have: {added}; they were unfrozen, or "
                f"a module came into the model, later: give them to the wrapped optimizer; {remedy}"
            )
        if frozen := [name for name, p in self.trained.items() if not p.requires_grad]:
            raise ValueError(
                f"parameters that were frozen later, but are exchanged: {frozen}; unfreeze them, or {remedy}"
            )

    def _share(self) -> None:
        """Takes the wrapped optimizer's own objects, which it replaces when it loads a state."""
        self.state = self.optimizer.state
        self.param_groups = self.optimizer.param_groups
        self.defaults = self.optimizer.defaults


_ALL: weakref.WeakSet[Wrapping] = weakref.WeakSet()
_LOCK = threading.Lock()


def _tell(apart: list[int], what: str) -> None:
    """Logs steps since all ranks held the same, or a rank's state was saved, when their owner goes, too late to ask.

    Nothing is logged after an exception, which is why nobody finished. A rank that finishes while others go on without
    finishing is told by an error.
    """
    if apart[0] and sys.exception() is None and getattr(sys, "last_value", None) is None:
        logger.warning(
            "%d steps of %s since its ranks last came together: their parameters may differ, and what is under way is "
            "lost. End with finish(), which `with` calls, on every rank",
            apart[0],
            what,
        )


def _share_again(wrapping: weakref.ref[Wrapping], _: Optimizer) -> None:
    """Shares again after the wrapped optimizer loaded a state. It must not keep a wrapper alive that was replaced."""
    living = wrapping()
    if living is not None:
        living._share()


def _kinds(named: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (p.dtype, p.shape) for name, p in named.items()}


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is 0; one on a device is not read, and counts as another."""
    return not (isinstance(rate, Tensor) and rate.device.type != "cpu") and float(rate) == 0
