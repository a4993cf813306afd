"""What a run needs to go on after an interruption: what all workers share, and what each has of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hetopt.core.run_spec import RunSpec
from hetopt.trainer.comm.compressor import State
from hetopt.trainer.context import Generators


@dataclass(frozen=True, kw_only=True)
class SharedState:
    """The part that is the same on every rank.

    Attributes:
        digest: which run it belongs to, see `run_digest`.
        step: steps done.
        training_s: seconds trained so far, over all attempts.
        shares: local batch sizes, in rank order.
        model: its state dictionary.
        optimizer: its state dictionary.
        cursor: where the data stands.
        policy: name of the batch policy.
        controller: what the batch policy remembers, as plain JSON.
        steering: what steers the exchange remembers, likewise; None: nothing does.
        loss_scale: of fp16.
        memory_bounds: samples of the largest micro-batch that each worker learned to fit, in rank order; 0: none.
        target_reached: nothing is left to do for a run that ends at its target.
        script: what a script has besides; None: it is no script's.
    """

    digest: str
    step: int
    training_s: float
    shares: tuple[int, ...]
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    cursor: Mapping[str, int]
    policy: str
    controller: Mapping[str, object]
    steering: Mapping[str, object] | None
    loss_scale: Mapping[str, Any] | None
    memory_bounds: tuple[int, ...]
    target_reached: bool
    script: Mapping[str, Any] | None = None

    def snapshot(self) -> SharedState:
        """The same with tensors of its own, on the CPU: training may go on while it is written."""
        return replace(self, model=copied(self.model), optimizer=copied(self.optimizer), script=copied(self.script))


@dataclass(frozen=True, kw_only=True)
class RankState(Generators):
    """The part that is each worker's own; ``local`` where it trains for itself (`Synchronizer`), ``script`` where one
    drives it."""

    memory: State
    local: Mapping[str, Any] | None = None
    script: Mapping[str, Any] | None = None

    @classmethod
    def now(cls, memory: State, device: torch.device, *, local: Mapping[str, Any] | None = None) -> RankState:
        """The state of this worker at this moment."""
        return cls(memory=memory, local=local, **vars(Generators.at(device)))

    def snapshot(self) -> RankState:
        """The same with tensors of its own, on the CPU."""
        return replace(self, memory=copied(self.memory), local=copied(self.local), script=copied(self.script))


def run_digest(spec: RunSpec) -> str:
    """Names the training that a checkpoint belongs to: what must not change between its attempts.

    Workers, shares and the stop rule may: that is what resuming on another cluster, or for longer, is.
    """
    identity = spec.model_dump_json(include={"task", "seed", "compression", "precision", "partition", "injection"})
    return hashlib.sha256(identity.encode()).hexdigest()


def copied(value: Any) -> Any:
    """Nested dictionaries, lists and tuples with a copy of every tensor, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return value


def parameters_sha256(model: nn.Module) -> str:
    """A fingerprint of all parameters: equal only when they are bit-identical."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
