"""Runs a script for a few steps and keeps the gradients that its optimizers step by: what two scripts are compared by.

``python -m hetopt.profiler.script.gradients FOLDER NAME PRECISION SCRIPT ARGUMENTS``, in several processes by torchrun.
What is drawn at random is left out meanwhile, as workers, and samplers of another kind, draw other numbers: dropout of
all kinds drops nothing, samplers give the samples in their order, and noise is one number from the first batch on.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from hetopt.core.paths import inside
from hetopt.core.search_path import run_script
from hetopt.profiler.script.hooks import be_alone
from hetopt.profiler.script.in_float64 import FLOAT64, Float64
from hetopt.profiler.script.observer import normalises

STEPS = 3
"""Float32 rounding is amplified by training from then on."""

FILE = "{name}-{rank}.pt"
OPTIONS_FILE = "{name}-{rank}.json"
"""What each optimizer was told at each step: [optimizers][steps][groups] numbers by name."""

NORMALISES_FILE = "{name}-normalises"
"""Is there if the model normalises by the samples of its batch."""

_PATIENCE_S = 20.0

_NOISE = ("randn", "rand", "randn_like", "rand_like", "normal", "randint", "randint_like")

TINY = 1e-12
"""Stands for the norm of a gradient that is zero."""


class GradientRecorder:
    """Keeps what each optimizer finds in ``.grad`` and is told at its first steps, and ends the process after them.

    Args:
        path: of the file of gradients.
        options: of the file of learning rates and other numbers.
        others: files of the other workers, which this one waits for before it leaves them.
    """

    def __init__(self, path: Path, options: Path, others: list[Path]) -> None:
        self._path, self._options_path, self._others = path, options, others
        self._seen: dict[int, list[Tensor]] = {}
        self._options: dict[int, list[list[dict[str, float]]]] = {}

    def after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """One more step."""
        steps = self._seen.setdefault(id(optimizer), [])
        if len(steps) == STEPS:
            return
        self._options.setdefault(id(optimizer), []).append([_numbers(group) for group in optimizer.param_groups])
        steps.append(
            torch.cat(
                [
                    (torch.zeros_like(one) if one.grad is None else one.grad.detach().to_dense()).double().reshape(-1)
                    for group in optimizer.param_groups
                    for one in group["params"]
                    if one.requires_grad
                ]
            ).cpu()
        )
        if all(len(one) == STEPS for one in self._seen.values()):
            self.end(0)

    def end(self, code: int) -> None:
        """Write, wait until the others have, and leave without another word of the script."""
        if code == 0:
            self._options_path.write_text(json.dumps(list(self._options.values())), encoding="utf-8")
            torch.save(list(self._seen.values()), self._path.with_suffix(".part"))
            self._path.with_suffix(".part").rename(self._path)
            begun_s = time.monotonic()
            while not all(one.exists() for one in self._others) and time.monotonic() - begun_s < _PATIENCE_S:
                time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str]) -> None:
    """Run the script until it has done enough steps."""
    folder, name, precision, script, *rest = arguments
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    paths = [inside(Path(folder), FILE.format(name=name, rank=one)) for one in range(workers)]
    options = inside(Path(folder), OPTIONS_FILE.format(name=name, rank=rank))
    recorder = GradientRecorder(paths[rank], options, paths)
    register_optimizer_step_post_hook(recorder.after_step)

    def notice(module: nn.Module, inputs: Any) -> None:
        if normalises(module):
            inside(Path(folder), NORMALISES_FILE.format(name=name)).touch()
            hook.remove()

    hook = nn.modules.module.register_module_forward_pre_hook(notice)
    _draw_nothing()
    _draw_one_number()
    _draw_alike()
    if workers == 1:
        be_alone()
    if precision == FLOAT64:
        Float64().begin()
    torch.set_num_threads(1)
    sys.argv = [script, *rest]
    try:
        run_script(script)
    except SystemExit as stop:
        recorder.end(0 if stop.code in (None, 0) else 1)
    recorder.end(0)


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How far recorded gradients are from those of one script.

    Attributes:
        steps: of its first optimizer, that were compared.
        largest: relative difference over all steps, for each of the others; infinite where they are of other
            parameters, or fewer.
        zero: steps whose gradient is all zeros, so that nothing was compared.
        normalises: whether the script that is right normalises by the samples of its batch (BatchNorm).
        options: the first number that an optimizer of the others is told otherwise, in words; empty: none.
    """

    steps: int
    largest: tuple[float, ...]
    zero: int = 0
    normalises: bool = False
    options: str = ""


def differences(folder: Path, name: str, others: Sequence[str]) -> Differences:
    """Compare what `GradientRecorder` wrote.

    Args:
        folder: with the files.
        name: of the script that is right.
        others: that are compared with it.
    """

    def read(one: str) -> list[list[Tensor]]:
        found: list[list[Tensor]] = torch.load(inside(folder, FILE.format(name=one, rank=0)), weights_only=True)
        return found

    right = read(name)

    def apart(found: list[list[Tensor]]) -> float:
        if [len(one) for one in right] != [len(one) for one in found]:
            return math.inf
        pairs = [pair for own, its in zip(right, found, strict=True) for pair in zip(own, its, strict=True)]
        if any(one.shape != other.shape for one, other in pairs):
            return math.inf
        return max((float((one - other).norm() / one.norm().clamp_min(TINY)) for one, other in pairs), default=0.0)

    return Differences(
        steps=len(right[0]) if right else 0,
        largest=tuple(apart(read(one)) for one in others),
        zero=sum(not one.any() for own in right for one in own),
        normalises=inside(folder, NORMALISES_FILE.format(name=name)).exists(),
        options=next((other for one in others if (other := _other_options(folder, name, one))), ""),
    )


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter group: its learning rate, momentum, weight decay."""
    numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()
               if not isinstance(value, Tensor) or value.numel() == 1}  # fmt: skip
    return {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float))}


def _other_options(folder: Path, name: str, other: str) -> str:
    """Return the first number that an optimizer is told otherwise than in the script that is right; empty: none."""
    right, compared = (
        json.loads(inside(folder, OPTIONS_FILE.format(name=script, rank=0)).read_text(encoding="utf-8"))
        for script in (name, other)
    )
    for number, (own, its) in enumerate(zip(right, compared, strict=False), start=1):
        for step, groups in enumerate(zip(own, its, strict=False), start=1):
            for before, after in zip(*groups, strict=False):
                for key in before:
                    if not math.isclose(before[key], after.get(key, math.nan), rel_tol=1e-9):
                        return f"{key} of optimizer {number} at step {step} is {after.get(key)}, and was {before[key]}"
    return ""


def _draw_nothing() -> None:
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, _as_it_is)
    attend = nn.functional.scaled_dot_product_attention

    def attend_to_all(*given: Any, **named: Any) -> Tensor:
        if len(given) > 4:  # after query, key, value and mask comes the chance to drop
            given = (*given[:4], 0.0, *given[5:])
        else:
            named["dropout_p"] = 0.0
        return attend(*given, **named)

    nn.functional.scaled_dot_product_attention = attend_to_all
    nn.RNNBase.dropout = property(lambda _: 0.0, lambda *_: None)  # type: ignore[assignment]  # as said at the top
    # A coin shows its expectation: who divides by its chance keeps what was given.
    Tensor.bernoulli_ = lambda given, p=0.5, **_: given.copy_(p) if isinstance(p, Tensor) else given.fill_(p)  # type: ignore[assignment, method-assign]
    RandomSampler.__iter__ = _in_order  # type: ignore[method-assign]  # as said at the top
    DistributedSampler.__iter__ = _in_order  # type: ignore[method-assign, assignment]


def _draw_one_number() -> None:
    """Noise of samples is the same on whichever worker they are; what was drawn before is weights and data.

    Single numbers stay: they are of the whole batch, and a session refuses what workers draw of that.
    """
    iterate, begun = DataLoader.__iter__, False

    def begin(loader: DataLoader[Any]) -> Any:
        nonlocal begun
        begun = True
        return iterate(loader)

    def of_one_number(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(draw)
        def drawn(*given: Any, **named: Any) -> Tensor:
            found = draw(*given, **named)  # the session hears it
            if begun and found.numel() > 1:
                bounds = [one for one in (*given, named.get("low"), named.get("high")) if isinstance(one, int)]
                is_whole = not found.is_floating_point()
                found.detach().fill_(sum(bounds) // max(2, len(bounds)) if is_whole else 0.5)
            return found

        return drawn

    DataLoader.__iter__ = begin  # type: ignore[method-assign]  # as said at the top
    for name in _NOISE:
        setattr(torch, name, of_one_number(getattr(torch, name)))


def _draw_alike() -> None:
    """Of scripts that set no seed all begin with the same weights and data."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _as_it_is(given: Tensor, *_: Any, **__: Any) -> Tensor:
    return given


def _in_order(sampler: Any) -> Iterator[int]:
    return iter(range(sampler.num_samples))


if __name__ == "__main__":
    main(sys.argv[1:])
