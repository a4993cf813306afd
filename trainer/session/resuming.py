"""What a session goes on from after an interruption, in the middle of an epoch, by the trainer's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hetopt.core.errors import BadInput
from hetopt.trainer.checkpoints.state import RankState, SharedState
from hetopt.trainer.session.random_state import States
from hetopt.trainer.statistics import parameters_of

_PLAIN = (Tensor, bool, int, float, str, type(None))

Extra = Mapping[str, Any]
"""What a script has besides model and optimizer (a scheduler, a GradScaler), by name; each with a state dictionary."""


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


def script_state(model: nn.Module, optimizers: Sequence[Optimizer], extra: Extra) -> dict[str, Any]:
    """Return what all workers share of a script besides its model and optimizer.

    Raises:
        BadInput: it is made of other things than tensors and plain values.
    """
    states = {name: one.state_dict() for name, one in extra.items()}
    for name, state in states.items():
        strange = next((leaf for leaf in tree_leaves(state) if not isinstance(leaf, _PLAIN)), None)
        if strange is not None:
            raise BadInput(
                f"The state of {name} holds something of type {type(strange).__name__}; checkpoints hold tensors and "
                "plain values.",
                hint="leave it out of `extra`, or give its state_dict numbers, texts, lists and tensors",
            )
    return {"extra": states, "others": [one.detach() for one in _others(model, optimizers)]}


def restore(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    extra: Extra,
    shared: SharedState,
    own: RankState,
    device: torch.device,
) -> None:
    """Give a script what it had when the states were taken.

    Raises:
        BadInput: they are another script's.
    """
    kept, script = shared.script or {}, own.script or {}
    if set(kept["extra"]) != set(extra):
        saved, given = (", ".join(sorted(names)) or "nothing" for names in (kept["extra"], extra))
        raise BadInput(
            f"The checkpoint of step {shared.step} has {saved} as `extra`, and run.resume was given {given}.",
            hint="give run.checkpoint and run.resume the same names",
        )
    try:
        model.load_state_dict(dict(shared.model))
        for number, optimizer in enumerate(optimizers):
            optimizer.load_state_dict(shared.optimizer[str(number)])
        for name, one in extra.items():
            one.load_state_dict(kept["extra"][name])
        with torch.no_grad():
            for parameter, value in zip(_others(model, optimizers), kept["others"], strict=True):
                parameter.copy_(value)
            for name, buffer in model.named_buffers():
                buffer.copy_(script["buffers"][name])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"The checkpoint of step {shared.step} does not fit the script's model, optimizer or `extra`.",
            hint="resume the script that it was saved by, or begin anew in another folder",
        ) from None
    own.restore_generators(device)
    States.of(script["random"]).use()


def _others(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that only the optimizer knows."""
    known = {id(one) for one in model.parameters()}
    every = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
    return [parameter for parameter in every if id(parameter) not in known]
