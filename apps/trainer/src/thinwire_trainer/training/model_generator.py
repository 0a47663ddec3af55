"""Random numbers that a rank's model draws: its own, also where ranks share a process."""

from typing import Any, ClassVar

import torch

from thinwire_trainer.launching.device import uses_gpu


class ModelGenerator:
    """Torch's global generators, of the CPU and of a GPU, as one rank has them: for what takes no other, as dropout.

        with generator:
            task.loss(batch, …).backward()

    Seeded when it is made. Ranks of a simulated world share torch's generators, which are this rank's inside the block;
    no rank waits there. A rank with a process to itself has them all the time: what draws outside of blocks, such as an
    optimizer of one's own, draws from the same numbers, and a step costs nothing but a copy.
    """

    _last: ClassVar["ModelGenerator | None"] = None
    """Rank of this process that had torch's generators last."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        ModelGenerator._last = self
        self._keep()

    def __enter__(self) -> None:
        if ModelGenerator._last is not self:
            self._put_back()

    def __exit__(self, *_: object) -> None:
        self._keep()

    def state_dict(self) -> dict[str, Any]:
        """State of both generators; None for that of a GPU that there is not."""
        if ModelGenerator._last is self:
            self._keep()
        return {"torch_rng": self._cpu, "cuda_rng": self._cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        self._cpu, self._cuda = state["torch_rng"], state["cuda_rng"]
        self._put_back()

    def _keep(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if uses_gpu() else None

    def _put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None and uses_gpu():  # else a GPU draws on from where this run's seed put it
            torch.cuda.set_rng_state(self._cuda)
        ModelGenerator._last = self
