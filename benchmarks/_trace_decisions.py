"""Clusters chosen by predicted steps and judged by measured ones, on the public step traces.

A configuration is a layout and a local batch size; its true step is the median of its rows, its price the
worker-seconds of a sample. A chooser has seen the layouts of one and two nodes, or one more that hetopt names, and
predicts every configuration.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks._decided import Array, Belief, Chooser, Menu
from benchmarks._step_baselines import columns, steps_and_reach
from benchmarks._step_traces import Samples, read
from hetopt.core.memory import non_negative
from hetopt.core.step_samples import StepSample
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.step_time.model import StepTime, StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.priors import PRIORS, Normal


@dataclass(frozen=True, kw_only=True)
class Table:
    """The configurations of a folder of step traces, with measured and shown times.

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
        """Return the seconds of a sample, from those of a step."""
        return np.asarray(steps_s, dtype=np.float64) / self.samples

    def belief(self, predicted: Sequence[StepTime]) -> Belief:
        """Return predicted step times with their intervals as a belief."""
        return Belief(
            seconds=self.seconds([step_time.step_time_s for step_time in predicted]),
            log_sd=np.log([step_time.step_time_high_s / step_time.step_time_s for step_time in predicted]) / Z90,
        )

    def certain(self, steps_s: Sequence[float] | Array) -> Belief:
        """Return step times that are predicted without an interval as a belief."""
        return Belief(seconds=self.seconds(steps_s), log_sd=np.zeros(len(self.samples)))

    def hetopt(self, shown: Samples, priors: Mapping[str, Normal] = PRIORS) -> Belief:
        """Return the belief of hetopt's model, fitted to shown samples."""
        return self.belief(StepTimeModel.fit(observe(shown), {}, priors).predict(self.configurations))

    def peer(self, name: str, shown: Samples) -> Belief:
        """Return the belief of a published model, with the interval that its own held-out errors give it."""
        steps_s, reach = steps_and_reach(name, shown, self.configurations)
        return Belief(seconds=self.seconds(steps_s), log_sd=np.full(len(self.samples), reach / Z90))

    def linear(self) -> Belief:
        """Return the belief of linear scaling: a step of many workers takes as long as one of a single worker."""
        alone = [sample for sample in self.shown["no probe"] if sample.workers == 1]
        design = np.array([(1 / s.step_time_s, max(s.batch_sizes) / s.step_time_s) for s in alone])
        fixed_s, per_sample_s = non_negative(design)
        return self.certain(fixed_s + per_sample_s * columns(self.configurations)[2])

    @property
    def biggest(self) -> Chooser:
        """The chooser of most workers, each with the largest batch that fits."""
        workers, _, batch = columns(self.configurations)
        return _always(np.lexsort((batch, workers))[-1])

    @property
    def cheapest_per_hour(self) -> Chooser:
        """The chooser of fewest workers, with the largest batch that fits."""
        workers, _, batch = columns(self.configurations)
        return _always(np.lexsort((-batch, workers))[0])


def _always(row: np.intp) -> Chooser:
    """Return a chooser that takes the same row, whatever the limits."""

    def chosen(limits: Limits) -> int:
        return int(row)

    return chosen


def table(root: Path, folder: str) -> Table:
    """Return the table of a folder; its probe is the one that `hetopt predict --suggest-probes 1` suggests."""
    profile, answers = read(root, folder, "profile"), read(root, folder, "answers")
    probe = StepTimeModel.fit(observe(profile), {}).suggest(answers, 1, [None] * len(answers))[0]
    layout = answers[probe.row].layout
    cells: dict[object, list[StepSample]] = {}
    for sample in profile + answers:
        cells.setdefault((sample.layout, sample.batch_sizes), []).append(sample)
    configurations = tuple(cell[0] for cell in cells.values())
    samples = np.array([sum(configuration.batch_sizes) for configuration in configurations], dtype=np.float64)
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
