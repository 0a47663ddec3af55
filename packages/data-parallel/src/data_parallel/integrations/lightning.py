"""Lightning: callbacks for Trainer(strategy="ddp"), on CPUs too, with checkpoints that hold every rank's state."""

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from data_parallel.ddp.hook import SparseHookState
from data_parallel.integrations.attaching import hooked, leave, left_to_optimizers
from data_parallel.optimizer import ExchangingOptimizer

logger = logging.getLogger(__name__)

HOW = 'Trainer(strategy="ddp"), or a DDPStrategy without a hook of its own'
ALONE = "one rank: nothing is exchanged"


class SparseGradients(Callback):  # type: ignore[misc] # Lightning's types are not at hand
    """Gradients are exchanged by `sparse_hook`.

        Trainer(strategy="ddp", callbacks=[SparseGradients(density=0.01, momentum=0.9)])

    settings: of `SparseHookState`; its group, names and scaler are found. Lightning's own gradient_clip_val comes after
        the exchange: give clip_norm here in its place.

    Lightning's checkpoints hold the states of all ranks, and trainer.fit(ckpt_path=…) goes on from them. So every rank
    takes part in saving one, as Lightning asks for. With a single device nothing is exchanged.
    """

    def __init__(self, **settings: Any) -> None:
        self.state: SparseHookState | None = None
        self._settings = settings
        self._loaded: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets what an evaluation has read from a checkpoint; that of this training is read next."""
        self._loaded = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """DDP has been made; what a checkpoint held has been read."""
        if trainer.world_size == 1 and not self._loaded:
            logger.info(ALONE)
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.state = hooked(trainer.model, trainer.optimizers, self._settings, grad_scaler=scaler, how=HOW)
        if self._loaded:
            self.state.load_state_dict(self._loaded)
            self._loaded = {}

    def state_dict(self) -> dict[str, Any]:
        """Gathers the states of all ranks on rank 0, which writes them."""
        return {} if self.state is None else self.state.gathered_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until there is a module to load it into."""
        self._loaded = state_dict


class DistributedOptimizers(Callback):  # type: ignore[misc]
    """The `DistributedOptimizer`s or `UpdateOptimizer`s that configure_optimizers returns exchange, and not DDP.

        Trainer(strategy="ddp", callbacks=[DistributedOptimizers()])

    gradient_clip_val holds each rank's own gradient, before the exchange; with precision="16-mixed", where Lightning
    refuses it, give the optimizer clip_norm. Checkpoints: as with `SparseGradients`. A single `UpdateOptimizer` follows
    the module's forward, in manual optimization too; of several, make each by `for_model` over the part that it trains.
    After each batch, also of those that accumulate, parameters are those of all ranks.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """DDP and optimizers have been made."""
        if trainer.world_size == 1:
            logger.info(ALONE)
            return
        left_to_optimizers(trainer.model, trainer.optimizers, how=HOW)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves, for other callbacks read and write parameters; in manual optimization another backward may come."""
        if pl_module.automatic_optimization:
            leave(trainer.optimizers)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Leaves in manual optimization too, and after a forward without a backward."""
        leave(trainer.optimizers)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Forward or backward has failed, or was interrupted."""
        leave(trainer.optimizers)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the states of all ranks where Lightning has put this rank's."""
        for position, optimizer in enumerate(trainer.optimizers):
            if isinstance(optimizer, ExchangingOptimizer):
                checkpoint["optimizer_states"][position] = optimizer.gathered_state_dict()
