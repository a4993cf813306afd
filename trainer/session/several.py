"""The models and optimizers of a session, one or several (a generator and a discriminator, an actor and a critic)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.trainer.likeness import parameters_of


def as_one_model(models: Sequence[nn.Module]) -> nn.Module:
    """The only one, or a module of all of them, for what asks for names, parameters and buffers."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def as_sequence(given: object) -> tuple[Any, ...]:
    """What a script gave, one thing or several."""
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


class Optimizers:
    """The optimizers of a session, for what compares, counts and saves them.

    Args:
        each: in the order in which the script gave them.

    Raises:
        BadInput: two of them have the same parameter.
    """

    def __init__(self, each: Iterable[Optimizer]) -> None:
        self.each = tuple(each)
        owner: dict[int, int] = {}
        for number, one in enumerate(self.each):
            for parameter in parameters_of(one):
                if owner.setdefault(id(parameter), number) != number:
                    raise BadInput(
                        f"Optimizers {owner[id(parameter)]} and {number} of the session have a parameter of shape "
                        f"{tuple(parameter.shape)} in common, and its gradient can be for one step alone.",
                        hint="give every parameter to one optimizer alone, as groups of different options if need be",
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all of them."""
        return [group for one in self.each for group in one.param_groups]

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """What the optimizer that has a parameter remembers of it."""
        return next((one.state[parameter] for one in self.each if parameter in one.state), {})

    def state_dict(self) -> dict[str, Any]:
        """Of the only one, or of each by its number."""
        if len(self.each) == 1:
            return self.each[0].state_dict()
        return {str(number): one.state_dict() for number, one in enumerate(self.each)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` gave."""
        if len(self.each) == 1:
            self.each[0].load_state_dict(dict(state))
            return
        for number, one in enumerate(self.each):
            one.load_state_dict(state[str(number)])
