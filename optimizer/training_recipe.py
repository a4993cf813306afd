"""What training keeps of a parameter and computes with it: all of a model, or an adapter beside frozen weights.

passes   3           of the forward pass's operations, where all is trained: backward multiplies each matrix twice,
                     for the gradient of what went in and for its own
         2 + t       where a share t is trained: frozen matrices need no gradient of their own (Hu et al. 2022)
bytes    4 + 4 + o   of a trained parameter: itself, its gradient, and o of the optimizer's state, in single precision
         2 or 0.5    of a frozen one, in 16 bits or in 4 (NF4 and its scales, Dettmers et al. 2023)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.optimizer.model_counts import ModelCount

Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw8bit", "muon", "sgd", "adafactor"]

CONTRIBUTION = 3.0
"""Operations of a step over those of its forward pass, where all of a model is trained."""

MASTER_BYTES = 4
HALF_BYTES = 2
"""Of a trained parameter: itself and its gradient in single precision each, and the copy that is multiplied with in 16
bits (Rajbhandari et al. 2020, section 3.1)."""

STATE_BYTES: Mapping[Optimizer, int] = MappingProxyType(
    {"adamw": 8, "adamw8bit": 2, "muon": 4, "sgd": 4, "adafactor": 0}
)
"""Of a trained parameter: two moments, two in 8 bits (Dettmers et al. 2022), one momentum; Adafactor keeps rows and
columns alone."""

FROZEN_BYTES: Mapping[Method, float] = MappingProxyType({"full": 0.0, "lora": 2.0, "qlora": 0.516})
"""Of a frozen parameter: NF4 takes 4.127 bits with its doubly quantised scales (Dettmers et al. 2023, section 3)."""

ADAPTER_SHARE = 0.01
"""Of the parameters, in the adapters of every linear layer: rank 16 is 0.6 % of 7 billion, and 1 % of 1 billion."""

DEQUANTISING = 1.39
"""Times as long that a step takes with weights in 4 bits as in 16 (Raschka 2023, "Finetuning LLMs with LoRA and QLoRA:
insights from hundreds of experiments": 39 % for 33 % less memory)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train a model: which parameters, by which optimizer.

    Attributes:
        trained: share of the parameters that is trained.
    """

    method: Method = "full"
    trained: float = 1.0
    optimizer: Optimizer = "adamw"

    @property
    def passes(self) -> float:
        """Operations of a step over those of the forward pass."""
        return CONTRIBUTION - 1 + self.trained

    @property
    def slowdown(self) -> float:
        """Times as long that the operations take."""
        return DEQUANTISING if self.method == "qlora" else 1.0

    def trained_parameters(self, parameters: int) -> int:
        """Return the number of parameters that have gradients."""
        return max(1, round(self.trained * parameters))

    def weight_bytes(self, parameters: int, *, half: bool) -> float:
        """Return the bytes of a replica's weights, as they are multiplied with, in 16 bits or in full."""
        each = HALF_BYTES if half else MASTER_BYTES
        return self.trained * parameters * each + self._frozen_bytes(parameters)

    def memory(self, model: ModelCount, batch_size: int, *, half: bool) -> TrainingMemory:
        """Return the bytes that training holds and takes in a step, activations of every layer included."""
        trained = self.trained_parameters(model.parameters)
        copied_bytes = HALF_BYTES * trained if half else 0
        sample_bytes = model.activation_bytes * (1 if half else 2)
        return TrainingMemory(
            parameter_bytes=round(MASTER_BYTES * trained + self._frozen_bytes(model.parameters)),
            buffer_bytes=0,
            gradient_bytes=MASTER_BYTES * trained,
            optimizer_bytes=STATE_BYTES[self.optimizer] * trained,
            steps=tuple(
                StepMemory(
                    samples=size, computing_bytes=max(1, round(copied_bytes + sample_bytes * size)), updating_bytes=0
                )
                for size in sorted({1, max(2, batch_size)})
            ),
        )

    def _frozen_bytes(self, parameters: int) -> float:
        return (1 - self.trained) * parameters * FROZEN_BYTES[self.method]


FULL = Recipe()
