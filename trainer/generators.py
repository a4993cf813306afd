"""Where torch's random sequences of a worker stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Generators:
    """States of torch's random generators: the CPU's, and the GPU's of a worker that has one."""

    cpu_generator: Tensor
    cuda_generator: Tensor | None

    @staticmethod
    def at(device: torch.device) -> Generators:
        """As they are at this moment."""
        on_gpu = device.type == "cuda"
        return Generators(
            cpu_generator=torch.get_rng_state(),
            cuda_generator=torch.cuda.get_rng_state(device) if on_gpu else None,
        )

    def restore_generators(self, device: torch.device) -> None:
        """Continue the random sequences; a device that the state does not know keeps its own."""
        torch.set_rng_state(self.cpu_generator)
        if device.type == "cuda" and self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator, device)

    def has_drawn(self, device: torch.device) -> bool:
        """Return whether random numbers of torch were drawn since these states were taken."""
        now = Generators.at(device)
        pairs = ((now.cpu_generator, self.cpu_generator), (now.cuda_generator, self.cuda_generator))
        return any(one is not None and other is not None and not torch.equal(one, other) for one, other in pairs)
