"""Process that runs a script for a few steps and saves the gradients of its optimizers, to compare runs.

``python -m hetopt.profiler.script.gradients FOLDER NAME SCRIPT ARGUMENTS``, in several processes by torchrun. Workers
draw different random numbers, so dropout drops nothing, samplers give samples in their order, and noise is one number
from the first batch on.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from hetopt.core.artifact import Record, read_record
from hetopt.core.paths import inside
from hetopt.core.run_folder import SPEC_VARIABLE
from hetopt.core.run_spec import RunSpec
from hetopt.core.search_path import run_script
from hetopt.profiler.script.observer import alive, be_alone, flat_gradient, normalises
from hetopt.trainer.ddp.comm_hook import keep_modules
from hetopt.trainer.ddp.script import DdpRun, unequal
from hetopt.trainer.script.batches import REGISTRY, ShareTable

STEPS = 3
"""Number of steps that are recorded: later ones differ by float32 rounding, which training amplifies."""

LATER = (10, 1000)
"""Steps of a learning-rate schedule at which its rate is recorded."""

FILE = "{name}-{rank}.pt"

_PATIENCE_S = 20.0

_NOISE = ("randn", "rand", "randn_like", "rand_like", "normal", "randint", "randint_like")

TINY = 1e-12
"""Least norm of a gradient that differences are divided by, in place of zero."""

RANKS_VARIABLE = "HETOPT_BATCHES_OF"
"""Environment variable: number of ranks whose batches a script that runs alone reads as one."""

BATCH_VARIABLE = "HETOPT_BATCH_OF_RANK"
"""Environment variable: samples of a rank's batch. A script that divides its batch by its workers reads the whole one
when alone, so that no batches are joined."""

AS_ONE_VARIABLE = "HETOPT_AS_ONE"
"""Environment variable that is set where the first of several workers computes every batch whole."""

Way: TypeAlias = Literal["", "ddp", "session"]
"""How a script trains on several workers: by DistributedDataParallel, by a session, or (empty) by neither."""


class RecordedFacts(Record):
    """Facts of a recorded run of a script beside its gradients: learning rates, batch size, and how it trains.

    Attributes:
        rates: learning rate of the first parameter group, [optimizers][steps].
        schedules: learning rates of each schedule at the steps `LATER`, [schedules][steps].
        way: means by which the script trains on several workers.
        normalises: whether a module normalises by the samples of its batch.
        batch_size: samples of a rank's batch, of the first DataLoader that was read; 0: not known.
        keeps_equal: whether a script with DistributedDataParallel kept equal shares, as no loader of it could be shared
            out.
    """

    rates: tuple[tuple[float, ...], ...] = ()
    schedules: tuple[tuple[float, ...], ...] = ()
    way: Way = ""
    normalises: bool = False
    batch_size: int = 0
    keeps_equal: bool = False


class GradientRecorder:
    """Recorder of the gradients and learning rates of each optimizer's first 3 steps; then it ends the process.

    Args:
        path: file that the record is written to.
        others: files of the records of all workers, awaited before the process ends.

    Attributes:
        ddp_run: returns the script's run under DistributedDataParallel; None: there is none.
        batch_size: batch size of the first DataLoader that was read; 0: not known, None: no DataLoader was read.
    """

    def __init__(self, path: Path, others: list[Path]) -> None:
        """Make a recorder without steps."""
        self._path, self._others = path, others
        self._seen: dict[int, list[Tensor]] = {}
        self._rates: dict[int, list[float]] = {}
        self.ddp_run: Callable[[], DdpRun | None] = lambda: None
        self.batch_size: int | None = None

    def notice(self, loader: DataLoader[Any]) -> None:
        """Keep the batch size, samples, of the first DataLoader that is read; later calls change nothing."""
        if self.batch_size is None:
            self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0

    def after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Record one optimizer step's gradient (torch's post-step hook); end the process once all have 3.

        Later steps of an optimizer that has 3 are passed over; the hook's other arguments are not used.
        """
        steps = self._seen.setdefault(id(optimizer), [])
        if len(steps) == STEPS:
            return
        self._rates.setdefault(id(optimizer), []).append(float(optimizer.param_groups[0].get("lr", 0.0)))
        parameters = (
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        )
        steps.append(flat_gradient(parameters, torch.float64).cpu())
        if all(len(gradients) == STEPS for gradients in self._seen.values()):
            self.end(0)

    def end(self, code: int) -> None:
        """Exit the process with ``code``; never returns.

        With code 0, the record is saved first, and other ranks' records are awaited for up to 20 s.
        """
        if code == 0:
            run = self.ddp_run()
            way: Way = "session" if REGISTRY.begun else "" if run is None else "ddp"
            facts = RecordedFacts(
                rates=tuple(map(tuple, self._rates.values())),
                schedules=tuple(sorted(map(_later_rates, alive(LRScheduler)))),
                way=way,
                normalises=any(map(normalises, alive(nn.Module))),
                batch_size=self.batch_size or 0,
                keeps_equal=run is not None and not run.shares_batches,
            )
            torch.save((list(self._seen.values()), facts.model_dump()), self._path.with_suffix(".part"))
            self._path.with_suffix(".part").rename(self._path)
            begun_s = time.monotonic()
            while not all(path.exists() for path in self._others) and time.monotonic() - begun_s < _PATIENCE_S:
                time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str]) -> None:
    """Run the script of ``arguments``, [FOLDER, NAME, SCRIPT, ...], until 3 steps are recorded; ends the process.

    The record is in FOLDER, in a file of each rank. Random numbers are switched off in this process, and seeds are 0.

    Raises:
        BadInput: NAME cannot be the name of a file, or the run's spec cannot be read.
    """
    folder, name, script, *rest = arguments
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    paths = [inside(Path(folder), FILE.format(name=name, rank=worker)) for worker in range(workers)]
    recorder = GradientRecorder(paths[rank], paths)
    register_optimizer_step_post_hook(recorder.after_step)
    _draw_nothing()
    _draw_one_number(recorder.notice)
    # Of scripts that set no seed all begin with the same weights and data.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if workers == 1:
        be_alone()
        ranks, each = (int(os.environ.get(name, "1")) for name in (RANKS_VARIABLE, BATCH_VARIABLE))
        _read_as_one(lambda: 1 if recorder.batch_size == ranks * each > 1 else ranks)
    else:
        keep_modules()
    spec = os.environ.get(SPEC_VARIABLE)
    around: Any = nullcontext(recorder.ddp_run)
    if spec is not None and workers > 1:
        ShareTable.turns = True
        run_spec = read_record(RunSpec, Path(spec), hint="run the command again")
        run_dir = inside(Path(folder), f"{name}-run")
        around = unequal(run_spec, run_dir, as_one=AS_ONE_VARIABLE in os.environ)
        if rank == 0:
            run_dir.mkdir()
    torch.set_num_threads(1)
    sys.argv = [script, *rest]
    try:
        with around as recorder.ddp_run:
            run_script(script)
            recorder.end(0)
    except SystemExit as stop:
        recorder.end(0 if stop.code in (None, 0) else 1)


def _later_rates(schedule: LRScheduler) -> tuple[float, ...]:
    """Return the learning rates of a schedule at the steps `LATER`, by stepping it; its last rate if it ends before."""
    rates = []
    for step in LATER:
        with suppress(ValueError, TypeError):  # OneCycleLR ends at its last step; others follow what is measured
            for _ in range(step - schedule.last_epoch):
                schedule.step()
        rates.append(float(schedule.optimizer.param_groups[0]["lr"]))
    return tuple(rates)


def recorded(folder: Path, name: str) -> tuple[list[list[Tensor]], RecordedFacts]:
    """Return what rank 0 of a recorded run saved: flat fp64 gradients, [optimizers][steps], and `RecordedFacts`.

    Raises:
        OSError: rank 0 saved nothing.
        BadInput: ``name`` cannot be the name of a file.
    """
    gradients, facts = torch.load(inside(folder, FILE.format(name=name, rank=0)), weights_only=True)
    return gradients, RecordedFacts(**facts)


def distances(right: list[list[Tensor]], other: list[list[Tensor]]) -> list[float]:
    """Return by step the relative difference of two runs' gradients, the worst optimizer's; inf: not comparable.

    The norm of the difference is divided by the norm of ``right``'s gradient, for the steps that both runs have.
    Gradients of unlike length, or not finite, give inf; unlike numbers of optimizers give [inf].

    Args:
        right: gradients of the run to compare with, [optimizers][steps], flat.
        other: gradients of the other run, likewise.
    """
    if len(right) != len(other):
        return [math.inf]
    by_step: list[float] = []
    for gradients, other_gradients in zip(right, other, strict=True):
        for step, (gradient, another) in enumerate(zip(gradients, other_gradients, strict=False)):
            same = gradient.shape == another.shape
            apart = float((gradient - another).norm() / gradient.norm().clamp_min(TINY)) if same else math.inf
            if step == len(by_step):
                by_step.append(0.0)
            by_step[step] = max(by_step[step], apart if math.isfinite(apart) else math.inf)
    return by_step


def _draw_nothing() -> None:
    """Switch off dropout, Bernoulli draws and shuffling in this process for good, by replacing torch's functions.

    A Bernoulli draw gives its probability, and samplers give samples in the order of the data.
    """
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, lambda given, *_, **__: given)
    attend = nn.functional.scaled_dot_product_attention

    order = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    nn.functional.scaled_dot_product_attention = lambda *given, **named: attend(
        **{**dict(zip(order, given, strict=False)), **named, "dropout_p": 0.0}
    )
    nn.RNNBase.dropout = property(lambda _: 0.0, lambda *_: None)  # type: ignore[assignment]  # as said at the top
    # A coin shows its expectation: who divides by its chance keeps what was given.
    Tensor.bernoulli_ = lambda given, p=0.5, **_: given.copy_(p) if isinstance(p, Tensor) else given.fill_(p)  # type: ignore[assignment, method-assign]
    RandomSampler.__iter__ = lambda sampler: iter(range(sampler.num_samples))  # type: ignore[method-assign]  # as said at the top
    DistributedSampler.shuffle = property(lambda _: False, lambda *_: None)  # type: ignore[assignment]


def _draw_one_number(begins: Callable[[DataLoader[Any]], None]) -> None:
    """Make torch's random tensors hold one number, the same on every worker, once a DataLoader is read; for good.

    Tensors of one element stay random.

    Args:
        begins: called with each loader that is read.
    """
    iterate, begun = DataLoader.__iter__, False

    def begin(loader: DataLoader[Any]) -> Any:
        """Begin to read a loader; from then on random tensors hold one number."""
        nonlocal begun
        begun = True
        begins(loader)
        return iterate(loader)

    def of_one_number(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a drawing function whose tensors of several numbers hold one: 0.5, of integers the middle."""

        @wraps(draw)
        def drawn(*given: Any, **named: Any) -> Tensor:
            """Draw, and fill a tensor of several numbers with one in place, if a loader was read before."""
            noise = draw(*given, **named)  # the session hears it
            if begun and noise.numel() > 1:
                bounds = [bound for bound in (*given, named.get("low"), named.get("high")) if isinstance(bound, int)]
                is_whole = not noise.is_floating_point()
                noise.detach().fill_(sum(bounds) // max(2, len(bounds)) if is_whole else 0.5)
            return noise

        return drawn

    DataLoader.__iter__ = begin  # type: ignore[method-assign]  # as said at the top
    for name in _NOISE:
        setattr(torch, name, of_one_number(getattr(torch, name)))


class _AsOne:
    """Batch sampler that joins each ``ranks`` batches of another into one.

    Args:
        batches: sampler of the script's own batches of sample indices.
        ranks: number of batches that are joined.
    """

    def __init__(self, batches: Any, ranks: int) -> None:
        self._batches, self._ranks = batches, ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of as many batches as there are ranks as one; the last may be smaller."""
        batches = iter(self._batches)
        while batch := list(chain.from_iterable(islice(batches, self._ranks))):
            yield batch

    def __len__(self) -> int:
        return -(-len(self._batches) // self._ranks)


def _read_as_one(ranks: Callable[[], int]) -> None:
    """Let DataLoaders join the batches of ``ranks()`` ranks into one, for good; one without a batch sampler stays."""
    of_loader: Any = DataLoader._index_sampler

    def index_sampler(loader: DataLoader[Any]) -> Any:
        batches = of_loader.fget(loader)
        return batches if ranks() == 1 or loader.batch_sampler is None else _AsOne(batches, ranks())

    DataLoader._index_sampler = property(index_sampler)  # type: ignore[assignment]  # as said at the top


if __name__ == "__main__":
    main(sys.argv[1:])
