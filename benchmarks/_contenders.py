"""The jobs and the sides of `benchmarks.time_to_target`, with published settings, and the run that each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from benchmarks._composed import Job, data_folder
from benchmarks._rehearsal import By, Side, equal_shares
from hetopt.core.run_spec import (
    Compression,
    DeclaredTime,
    EmulatedHost,
    RatioPolicyName,
    RunSpec,
    Settings,
    StopRule,
    Synchronization,
    WorkerSpec,
)

WORKERS = 4
PERIOD = 10
"""Control period, steps: runs are so short that published periods would see little of them."""

SEEDS = (0, 1, 2)

PLAIN, STATIC, AUTO = "plain DDP", "Top-k 10x", "hetopt auto"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A side of the comparison: a trainer with its compression and synchronization.

    Attributes:
        by: trainer of the side.
        compression, ratio_policy, ratio_settings, sync: settings of hetopt's trainer.
        decides_by_links: whether its decisions depend on the links; then it has plain DDP's learning rate.
        is_quick: whether it takes part in the quick form.
    """

    by: By = "hetopt"
    compression: Compression = field(default_factory=Compression)
    ratio_policy: RatioPolicyName = "fixed"
    ratio_settings: Settings = field(default_factory=dict)
    sync: Synchronization = field(default_factory=Synchronization)
    decides_by_links: bool = False
    is_quick: bool = False

    @property
    def depends_on_links(self) -> bool:
        """Return whether the contender must train at every link rate: it decides by the links, or most of its steps
        exchange nothing, so that no step stands for all."""
        return self.decides_by_links or self.sync.is_local


OWN = Contender(ratio_policy="auto", sync=Synchronization(name="local-sgd", every_steps=8))
"""hetopt's own choice, of what is exchanged and how, and whether gradients are summed or parameters averaged."""

GRAVAC: Settings = {"window": 25}
"""Its published window, 500 steps, is longer than these runs: with this one it has tried its largest factor, 1000x,
after 125 steps."""

OTHERS: Mapping[str, Contender] = MappingProxyType(
    {
        PLAIN: Contender(by="ddp", is_quick=True),
        "DDP, fp16 hook": Contender(by="ddp-fp16"),
        "DDP, PowerSGD hook": Contender(by="ddp-powersgd", is_quick=True),
        "int8": Contender(compression=Compression(name="int8"), is_quick=True),
        "bf16": Contender(compression=Compression(name="bf16")),
        "local SGD 8, int8": Contender(
            compression=Compression(name="int8"),
            sync=Synchronization(name="local-sgd", every_steps=8),
            is_quick=True,
        ),
        "DiLoCo 30, int8": Contender(
            compression=Compression(name="int8"),
            sync=Synchronization(name="local-sgd", every_steps=30, outer_rate=0.7, outer_momentum=0.9),
            is_quick=True,
        ),
        STATIC: Contender(compression=Compression(name="topk", ratio=0.1), is_quick=True),
        "Top-k 1000x": Contender(compression=Compression(name="topk", ratio=0.001)),
        "DGC 1000x": Contender(compression=Compression(name="dgc", ratio=0.001), ratio_policy="warm_up"),
        "RedSync 1000x": Contender(compression=Compression(name="redsync", ratio=0.001), is_quick=True),
        "Accordion": Contender(compression=Compression(name="topk", ratio=0.01), ratio_policy="accordion"),
        "GraVAC": Contender(
            compression=Compression(name="topk", ratio=0.001),
            ratio_policy="gravac",
            ratio_settings=GRAVAC,
            decides_by_links=True,
        ),
    }
)
"""Everyone else, with published settings, but for `GRAVAC`; those that average round to 8 bits as well."""

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""On the task's learning rate; each contender trains with the one by which it needs the fewest steps to the target."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the benchmark, with its job and target.

    Attributes:
        job: task, data and length.
        quick_epochs: epochs of a run in the quick form.
        evaluations: number of evaluations in an epoch.
    """

    job: Job
    quick_epochs: float
    evaluations: int


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The settings that all runs of a model have in common.

    Attributes:
        model: model that is trained.
        quick: whether runs are shorter and sides fewer.
        only: names of the sides that take part; empty: all.
        seeds: seeds of the sides that train more than once.
        step_s: declared time of a step's computation; None: as fast as the machine goes.
        factors: on the task's learning rate, by side; 1 where it has none yet.
    """

    model: Model
    quick: bool
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    step_s: float | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def epochs(self) -> float:
        """The epochs of a whole run."""
        return self.model.quick_epochs if self.quick else self.model.job.epochs

    @property
    def others(self) -> dict[str, Contender]:
        """The contenders that take part, besides hetopt's own choice, by name."""
        taking_part = {name: each for name, each in OTHERS.items() if each.is_quick or not self.quick}
        return {name: taking_part[name] for name in self.only or taking_part}

    def side(
        self, name: str, contender: Contender, *, steps: int | None = None, seed: int = 0, factor: float = 1
    ) -> Side:
        """Return the side of a contender for a whole run, or for ``steps`` steps to be timed."""
        return Side(name=name, by=contender.by, spec=self.spec(contender, steps=steps, seed=seed, factor=factor))

    def spec(self, contender: Contender, *, steps: int | None = None, seed: int = 0, factor: float = 1) -> RunSpec:
        """Return the run spec of a contender for a whole run (None), or for ``steps`` steps to be timed."""
        job, folder = self.model.job, data_folder(self.model.job)
        shares = equal_shares(WORKERS, job.batch)
        return RunSpec(
            task=job.task,
            data_dir=str(folder) if folder is not None else None,
            workers=tuple(
                WorkerSpec(
                    host=f"h{place}",
                    type="equal",
                    local_batch_size=share,
                    threads=1,
                    declared=None if self.step_s is None else DeclaredTime(per_sample_s=self.step_s / share),
                )
                for place, share in enumerate(shares)
            ),
            compression=contender.compression,
            ratio_policy=contender.ratio_policy,
            ratio_settings=contender.ratio_settings,
            sync=contender.sync,
            seed=seed,
            collective_policy="cheapest" if contender.ratio_policy == "auto" else "fixed",
            learning_rate_scale=factor,
            batch_policy="static",
            stop=StopRule(max_epochs=self.epochs) if steps is None else StopRule(max_steps=steps),
            evaluate_every_epochs=1 / self.model.evaluations if steps is None else 1e6,
            control_period_steps=PERIOD if steps is None else max(1, steps // 4),
            checkpoint_every_s=1e6,
        )


def hosts(rate_bits_per_s: float | None) -> list[EmulatedHost]:
    """Return emulated hosts of equal speed, a worker each."""
    return [EmulatedHost(name=f"h{place}", rate_bits_per_s=rate_bits_per_s) for place in range(WORKERS)]


def sibling(attribute: str) -> str:
    """Return the reference of a task in `benchmarks._siblings`."""
    return f"{Path(__file__).with_name('_siblings.py')}:{attribute}"


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "convnet": Model(
            job=Job(task=sibling("convnet"), data="cifar10", batch=128, epochs=3.0), quick_epochs=1.0, evaluations=6
        ),
        "characters": Model(
            job=Job(
                task=sibling("characters"),
                data="wikitext-2",
                batch=64,
                epochs=0.75,
                metric="perplexity",
                higher_is_better=False,
                points=0.05,
            ),
            quick_epochs=0.5,
            evaluations=24,
        ),
    }
)

DIGITS = Model(job=Job(task="digits", data=None, batch=64, epochs=5.0), quick_epochs=5.0, evaluations=4)
"""Stands for a model whose data is not here."""

SMOKE = replace(DIGITS, quick_epochs=0.5, evaluations=8)
"""As little of it as shows that everything still runs."""
