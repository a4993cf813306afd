"""From what a person types to numbers in seconds, dollars and samples; each bad value becomes one sentence."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import cast, get_args

import typer

from hetopt.core.errors import BadInput
from hetopt.core.grammar import arguments, fields, numbers, split
from hetopt.core.quantities import MONEY, NUMBER, quantity
from hetopt.core.reading import read_text
from hetopt.core.run_spec import BatchPolicy
from hetopt.optimizer.market.catalog_filter import AnyMarket
from hetopt.optimizer.market.instance_type import Architecture
from hetopt.optimizer.plan import Objective, ScalingRule


def positive(text: float | str | None, option: str, unit: str) -> float | None:
    """A finite number above zero, which may be an amount such as '$20', or None when the option was not given."""
    if text is None:
        return None
    number = (
        quantity(text, MONEY if unit.startswith(("USD", "dollars")) else NUMBER, option)
        if isinstance(text, str)
        else text
    )
    if not math.isfinite(number) or number <= 0:
        raise BadInput(f"{option} must be a positive number of {unit}, not {text}.", hint=f"for example {option} 5")
    return number


def slowdowns(text: str | None) -> tuple[float, ...] | None:
    """'1,1,2,4' or '1 x2, 2, 4': one factor a worker, each at least 1."""
    if text is None:
        return None
    factors = numbers(text, "--slowdown")
    if any(factor < 1 for factor in factors):
        raise BadInput(
            f"--slowdown must be numbers of 1 or more with commas between, got {text!r}.",
            hint="for example --slowdown 1,1,2,4",
        )
    return factors


def policy(text: str | None) -> BatchPolicy | None:
    """The name of a batch policy."""
    if text is None:
        return None
    for name in get_args(BatchPolicy):
        if name == text:
            return cast(BatchPolicy, name)
    raise BadInput(
        f"there is no batch policy {text!r}.", hint=f"choose {', '.join(get_args(BatchPolicy))}; 'model' is the default"
    )


def scaling_rule(text: str | None) -> ScalingRule | None:
    """The name of a rule by which the learning rate follows the batch size."""
    if text is None:
        return None
    for name in get_args(ScalingRule):
        if name == text:
            return cast(ScalingRule, name)
    raise BadInput(f"there is no learning rate rule {text!r}.", hint=f"choose {', '.join(get_args(ScalingRule))}")


def market(text: str | None, *, spot: bool, on_demand: bool) -> AnyMarket:
    """The market, from one of three options.

    Raises:
        BadInput: no such market, or options that exclude each other.
    """
    asked: dict[str, str] = {"--spot": "spot"} if spot else {}
    if on_demand:
        asked["--on-demand"] = "on-demand"
    if text is not None:
        asked[f"--market {text}"] = text
    if len(set(asked.values())) > 1:
        raise BadInput(
            f"{' and '.join(asked)} exclude each other.", hint="keep one of them; --market any takes both markets"
        )
    wanted = next(iter(asked.values()), "spot")
    for name in get_args(AnyMarket):
        if name == wanted:
            return cast(AnyMarket, name)
    raise BadInput(f"--market must be spot, on-demand or any, not {wanted!r}.", hint="for example --market any")


def architecture(text: str | None) -> Architecture | None:
    """The name of a processor architecture."""
    if text is None:
        return None
    for name in get_args(Architecture):
        if name == text:
            return cast(Architecture, name)
    raise BadInput(f"there is no architecture {text!r}.", hint=f"choose {' or '.join(get_args(Architecture))}")


def objective(text: str) -> Objective:
    """The name of an objective."""
    for name in get_args(Objective):
        if name == text:
            return cast(Objective, name)
    raise BadInput(f"there is no objective {text!r}.", hint=f"choose {', '.join(get_args(Objective))}")


def time_weight(text: str | None) -> float | None:
    """'time=2,cost=1' as the part of time: 2/3."""
    if text is None:
        return None
    said = fields(arguments(text, "--weights"), {"time": "time", "cost": "cost"})
    weights = {name: quantity(value, NUMBER, f"--weights: {name}") for name, value in said.items()}
    if len(weights) != 2 or min(weights.values()) < 0 or not sum(weights.values()):
        raise BadInput(
            f"--weights must be time=W,cost=W with numbers of 0 or more, got {text!r}.",
            hint="for example --weights time=2,cost=1",
        )
    return weights["time"] / sum(weights.values())


def text_of(path: Path, option: str) -> str:
    """The text in a file that an option names.

    Raises:
        BadInput: it cannot be read.
    """
    return read_text(path, hint=f"name a text file with {option}")


def names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated text, without blanks around them; none for None or empty text."""
    return tuple(filter(None, split(text, ",;", "a list of names"))) if text else ()


def ready_to_write(path: Path | None, *, force: bool) -> None:
    """Refuse an output that could not be written, before any work is done for it; ask before replacing a file.

    Raises:
        BadInput: the folder is missing or read-only, the path is a folder, or the file exists and may not be replaced.
    """
    if path is None:
        return
    folder = path.parent if path.parent.parts else Path()
    if not folder.is_dir():
        raise BadInput(
            f"{path} cannot be written: there is no folder {folder}.", hint=f"make it with `mkdir -p {folder}`"
        )
    if path.is_dir():
        raise BadInput(f"{path} is a folder.", hint="name a file in it")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise BadInput(
            f"{path} cannot be written: permission denied.", hint="name a file in a folder that you can write to"
        )
    if path.is_file() and not force:
        if sys.stdin.isatty() and sys.stderr.isatty():
            if typer.confirm(f"{path} exists. Replace it?", err=True):
                return
            raise typer.Exit(2)
        raise BadInput(f"{path} exists already.", hint="add --force to replace it, or name another file")
