"""transformers' Trainer: callbacks that are given the trainer, with checkpoints that hold every rank's state."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from replicas import hash_bits
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from data_parallel.ddp.hook import SparseHookState
from data_parallel.integrations.attaching import hooked, inner_of, leave, left_to_optimizers

logger = logging.getLogger(__name__)

HOW = (
    "start the script by torchrun or accelerate launch, without FSDP or DeepSpeed, and call no evaluate() or predict() "
    "before train(), after which Trainer leaves DDP out (eval_on_start=True does not)"
)
FILE = "sparse_gradients.pt"
OPTIMIZER_FILE = "optimizer.pt"  # as Trainer calls it
WITHOUT = (
    "training goes on after step {step:,}, but the checkpoint has no state of the optimizer, as with "
    "save_only_model=True: what waits in residuals is lost, and moments and the warm-up begin anew"
)


class _Exchanging(TrainerCallback):  # type: ignore[misc] # transformers' types are not at hand
    """Base of both callbacks."""

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer is {trainer!r}: trainer.add_callback({type(self).__name__}(trainer, ...))")
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The model is in DDP; what Trainer saves has been loaded."""
        if args.world_size == 1:
            logger.info("one process: nothing is exchanged")
            return
        if args.save_on_each_node:
            raise ValueError("save_on_each_node=True, but rank 0 alone has the states of all ranks: write to one place")
        self._begin(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Trainer has written the rest of the checkpoint."""
        if args.world_size > 1 and not args.save_only_model:
            self._save(_folder(args, state), first=args.process_index == 0)

    def _begin(self, args: TrainingArguments, state: TrainerState) -> None:
        raise NotImplementedError

    def _save(self, folder: Path, *, first: bool) -> None:
        raise NotImplementedError


class SparseGradients(_Exchanging):
    """Gradients are exchanged by `sparse_hook`.

        trainer.add_callback(SparseGradients(trainer, density=0.01, momentum=0.9))

    settings: of `SparseHookState`; its group, names and scaler are found. Trainer clips after the exchange: set its
        max_grad_norm=0, and give clip_norm here. Its default optimizer is Adam, which learns badly behind a selection:
        give Trainer(optimizers=(SGD, None)), algorithm="powersgd" here, or take `DistributedOptimizers`.
    resume_from: the checkpoint that trainer.train(resume_from_checkpoint=…) goes on from, if it is not in output_dir.

    Each checkpoint has a file more, with the states of all ranks.
    """

    def __init__(self, trainer: Trainer, *, resume_from: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__(trainer)
        self.state: SparseHookState | None = None
        self._settings, self._resume_from = settings, resume_from

    def _begin(self, args: TrainingArguments, state: TrainerState) -> None:
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        self.state = hooked(trainer.model_wrapped, [trainer.optimizer], self._settings, grad_scaler=scaler, how=HOW)
        if state.global_step:
            self._load(Path(self._resume_from or _folder(args, state)) / FILE)

    def _load(self, path: Path) -> None:
        assert self.state is not None
        if not path.exists():
            raise FileNotFoundError(f"training goes on, but there is no {path}: give resume_from= that folder")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["parameters"] != _digest(self._trainer.model):
            raise ValueError(
                f"{path} was saved with other weights: give resume_from= the folder of this checkpoint. If it is that, "
                "Trainer has not loaded all of them, as transformers 5.24 does not of a ViT"
            )
        self.state.load_state_dict(saved["state"])

    def _save(self, folder: Path, *, first: bool) -> None:
        assert self.state is not None
        state = self.state.gathered_state_dict()
        if first:
            _write({"parameters": _digest(self._trainer.model), "state": state}, folder / FILE)


class DistributedOptimizers(_Exchanging):
    """A `DistributedOptimizer` or an `UpdateOptimizer` exchanges, and not DDP.

        adam = torch.optim.AdamW(model.parameters())
        optimizer = UpdateOptimizer.for_model(adam, model, steps=10_000)
        trainer = Trainer(model, arguments, optimizers=(optimizer, None), …)
        trainer.add_callback(DistributedOptimizers(trainer))

    TrainingArguments is made before the optimizer, because it starts the process group. max_grad_norm holds each rank's
    own gradient, before the exchange. The checkpoint's optimizer.pt holds the states of all ranks. An
    `UpdateOptimizer` follows the model's forward.
    """

    def _begin(self, args: TrainingArguments, state: TrainerState) -> None:
        left_to_optimizers(self._trainer.model_wrapped, [self._trainer.optimizer], how=HOW)
        if state.global_step and not inner_of(self._trainer.optimizer).stats()["steps"]:
            warnings.warn(WITHOUT.format(step=state.global_step), stacklevel=2)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Gradients accumulate; another callback may read parameters, or write them."""
        leave([self._trainer.optimizer])

    def _save(self, folder: Path, *, first: bool) -> None:
        state = inner_of(self._trainer.optimizer).gathered_state_dict()
        if first:
            _write(state, folder / OPTIMIZER_FILE)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _write(state: dict[str, Any], path: Path) -> None:
    """Writes the file completely or not at all."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def _digest(model: nn.Module) -> int:
    """One number for all bits of what is trained."""
    trained = [hash_bits(p).cpu() for p in model.parameters() if p.requires_grad]
    return int(hash_bits(torch.stack(trained)))
