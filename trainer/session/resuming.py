"""What a session goes on from after an interruption, in the middle of an epoch, by the trainer's own checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.trainer.checkpoints.state import RankState, SharedState
from hetopt.trainer.comm.compressor import State
from hetopt.trainer.likeness import Groups, parameters_of
from hetopt.trainer.session.progress import Resumed
from hetopt.trainer.session.random_state import States
from hetopt.trainer.session.several import Optimizers


class Stateful(Protocol):
    """What a script has besides model and optimizer: a scheduler, a GradScaler, an average of parameters."""

    def state_dict(self) -> Any:
        """What it is now."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Become what `state_dict` gave."""
        ...


Extra = Mapping[str, Stateful]
"""By name; the same on all workers."""


class Source(Protocol):
    """What gives batches."""

    def state(self) -> dict[str, Any]:
        """How far it is."""
        ...

    def resume(self, state: Mapping[str, Any], resumed: Resumed, /) -> None:
        """Go on from there."""
        ...


@dataclass(kw_only=True)
class Restored:
    """A checkpoint that a script goes on from, for what the script makes only later: its loaders, in their order.

    Attributes:
        shared: of all workers.
        sources: what each loader, or `split`, kept.
        resumed: random numbers as they stood.
        done: how many of them go on.
    """

    shared: SharedState
    sources: Sequence[Mapping[str, Any]]
    resumed: Resumed
    done: int = 0

    def give(self, source: Source) -> None:
        """The next loader is there.

        Raises:
            BadInput: it is another kind of thing than was saved.
        """
        kept = self.sources[self.done]
        if set(kept) != set(source.state()):
            raise BadInput(
                f"The script of the checkpoint of step {self.shared.step} got its batches in another way.",
                hint="make its loaders in the order in which they were made, or begin anew in another folder",
            )
        source.resume(kept, self.resumed)
        self.done += 1


def check_extra(extra: Extra) -> None:
    """See that a script's other things can be saved and restored in place.

    Raises:
        BadInput: one is a number, or another thing that nothing can be loaded into.
    """
    for name, one in extra.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise BadInput(
                f"`extra` has {name} of type {type(one).__name__}, which cannot be restored in place: it has no "
                "state_dict and load_state_dict.",
                hint="keep it in a small object that has both, as docs/your-own-code.md shows for a best value",
            )


def script_state(model: nn.Module, optimizer: Groups, extra: Extra) -> dict[str, Any]:
    """What all workers share of a script besides its model and optimizer.

    Raises:
        BadInput: it is made of other things than tensors and plain values.
    """
    states = {name: one.state_dict() for name, one in extra.items()}
    for name, state in states.items():
        if (strange := _strange(state)) is not None:
            raise BadInput(
                f"The state of {name} holds something of type {strange}; checkpoints hold tensors and plain values.",
                hint="leave it out of `extra`, or give its state_dict numbers, texts, lists and tensors",
            )
    return {
        "extra": states,
        "others": [one.detach() for one in _others(model, optimizer)],
    }


def own_state(model: nn.Module, memory: State, device: torch.device) -> RankState:
    """What a worker has of its own: what it holds back, random numbers, and statistics of its own samples."""
    script = {"random": States.now().plain(), "buffers": {name: one.detach() for name, one in model.named_buffers()}}
    return replace(RankState.now(memory, device), script=script)


def restore(
    model: nn.Module, optimizer: Optimizers, extra: Extra, shared: SharedState, own: RankState, device: torch.device
) -> None:
    """Give a script what it had when the states were taken.

    Raises:
        BadInput: they are another script's.
    """
    kept: Mapping[str, Any] = shared.script or {}
    saved = kept.get("extra", {})
    if set(saved) != set(extra):
        raise BadInput(
            f"The checkpoint of step {shared.step} has {_listed(saved)} as `extra`, and run.resume was given "
            f"{_listed(extra)}.",
            hint="give run.checkpoint and run.resume the same names",
        )
    try:
        model.load_state_dict(dict(shared.model))
        optimizer.load_state_dict(dict(shared.optimizer))
        for name, one in extra.items():
            one.load_state_dict(saved[name])
        with torch.no_grad():
            for parameter, value in zip(_others(model, optimizer), kept.get("others", ()), strict=True):
                parameter.copy_(value)
            buffers: Mapping[str, Tensor] = (own.script or {}).get("buffers", {})
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"The checkpoint of step {shared.step} does not fit the script's model, optimizer or `extra`.",
            hint="resume the script that it was saved by, or begin anew in another folder",
        ) from None
    own.restore_generators(device)
    if own.script is not None:
        States.of_plain(own.script["random"]).use()


def _strange(value: object) -> str | None:
    """The type of something in a state that cannot be written; None: all can."""
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return None
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        return type(value).__name__
    return next((found for one in parts if (found := _strange(one)) is not None), None)


def _others(model: nn.Module, optimizer: Groups) -> list[nn.Parameter]:
    """Parameters that only the optimizer knows."""
    known = {id(one) for one in model.parameters()}
    return [one for one in parameters_of(optimizer) if id(one) not in known]


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "nothing"
