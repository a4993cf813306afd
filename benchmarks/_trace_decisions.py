"""Clusters chosen by predicted steps and judged by measured ones: the public step traces as menus of configurations.

A configuration is a layout and a local batch size; its true step is the median of its rows, its price the
worker-seconds of a sample. Who chooses has seen the layouts of one and two nodes, or one more that hetopt names, and
predicts every configuration.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import _adaptdl
from benchmarks._decided import Array, Belief, Chooser, Menu
from benchmarks._held_out_priors import FLAT, learned_priors
from benchmarks._step_baselines import PeerModel, PeerName, columns
from benchmarks._step_traces import Samples, as_columns, read
from hetopt.core.memory import non_negative
from hetopt.core.step_samples import StepSample
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.step_time.model import StepTime, StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import Posterior, fit
from hetopt.optimizer.step_time.priors import PRIORS, Normal

PEERS: Mapping[str, PeerName] = {"Ernest": "ernest", "Scavenger": "scavenger", "Pollux, ours": "goodput"}
ADAPTDL = "Pollux, AdaptDL's own code"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One folder.

    Attributes:
        rows: all of them.
        shown: those of the protocol without a probe, and with one.
        configurations: one sample of each, whose times nobody reads.
    """

    folder: str
    rows: Samples
    shown: Mapping[str, Samples]
    configurations: tuple[StepSample, ...]
    menu: Menu
    samples: Array = field(repr=False)

    def seconds(self, steps_s: Sequence[float] | Array) -> Array:
        """Seconds of a sample."""
        return np.asarray(steps_s, dtype=np.float64) / self.samples

    def belief(self, told: Sequence[StepTime]) -> Belief:
        """Predicted steps with their intervals."""
        return Belief(
            seconds=self.seconds([one.step_time_s for one in told]),
            log_sd=np.log([one.step_time_high_s / one.step_time_s for one in told]) / Z90,
        )

    def certain(self, steps_s: Sequence[float] | Array) -> Belief:
        """Predicted steps of who states no interval."""
        return Belief(seconds=self.seconds(steps_s), log_sd=np.zeros(len(self.samples)))

    def hetopt(self, shown: Samples, priors: Mapping[str, Normal] = PRIORS) -> Belief:
        """What hetopt's model believes that has seen these."""
        return self.belief(StepTimeModel.fit(observe(shown), {}, priors).predict(self.configurations))

    def peer(self, name: PeerName, shown: Samples) -> Belief:
        """What a published model believes, with the interval that its own held-out errors give it."""
        return self.belief(PeerModel.fit(name, shown).predict(self.configurations))

    def linear(self) -> Belief:
        """Linear scaling: a step of many workers is one of a single worker, whose line over batch sizes is fitted."""
        alone = [sample for sample in self.shown["no probe"] if sample.workers == 1]
        design = np.array([(1 / s.step_time_s, max(s.batch_sizes) / s.step_time_s) for s in alone])
        fixed_s, per_sample_s = non_negative(design)
        return self.certain(fixed_s + per_sample_s * columns(self.configurations)[2])

    @property
    def biggest(self) -> Chooser:
        """The most workers, each with the most that fits."""
        workers, _, batch = columns(self.configurations)
        return _always(np.lexsort((batch, workers))[-1])

    @property
    def cheapest_per_hour(self) -> Chooser:
        """The fewest workers, with the most that fits."""
        workers, _, batch = columns(self.configurations)
        return _always(np.lexsort((-batch, workers))[0])


def _always(row: np.intp) -> Chooser:
    def chosen(limits: Limits) -> int:
        return int(row)

    return chosen


def table(root: Path, folder: str) -> Table:
    """Read a folder; the probe is the one that `hetopt predict --suggest-probes 1` names."""
    profile, answers = read(root, folder, "profile"), read(root, folder, "answers")
    probe = StepTimeModel.fit(observe(profile), {}).suggest(answers, 1, [None] * len(answers))[0]
    layout = answers[probe.row].layout
    cells: dict[object, list[StepSample]] = {}
    for sample in profile + answers:
        cells.setdefault((sample.layout, sample.batch_sizes), []).append(sample)
    configurations = tuple(cell[0] for cell in cells.values())
    samples = np.array([sum(one.batch_sizes) for one in configurations], dtype=np.float64)
    measured = np.array([statistics.median(sample.step_time_s for sample in cell) for cell in cells.values()])
    return Table(
        folder=folder,
        rows=profile + answers,
        shown={
            "no probe": profile,
            "one probe": profile + tuple(sample for sample in answers if sample.layout == layout),
        },
        configurations=configurations,
        menu=Menu(seconds=measured / samples, usd_per_s=columns(configurations)[0]),
        samples=samples,
    )


def adaptdl(tables: Sequence[Table], protocol: str) -> list[Belief] | None:
    """What AdaptDL's own code believes of each table; absent where it is not installed."""
    jobs = [{"shown": as_columns(t.shown[protocol]), "asked": as_columns(t.configurations)} for t in tables]
    told = _adaptdl.predict(jobs)
    return None if told is None else [t.certain(steps_s) for t, steps_s in zip(tables, told, strict=True)]


def fitted_whole(tables: Sequence[Table]) -> dict[str, Posterior]:
    """What all rows of each table say by themselves, under flat priors."""
    return {t.folder: fit(observe(t.rows), priors=FLAT, classes=()) for t in tables}


def priors_of_others(fits: Mapping[str, Posterior], same: Callable[[str, str], bool]) -> list[dict[str, Normal]]:
    """Priors for each table, from those that ``same`` does not count as the one that is scored."""
    return [learned_priors({other: one for other, one in fits.items() if not same(folder, other)}) for folder in fits]
