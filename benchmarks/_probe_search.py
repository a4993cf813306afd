"""Error against dollars: hetopt's exploration of a cluster beside Scavenger's full, partial and no search, offline.

A probe is a launch of one layout at all of its recorded batch sizes; its steps are read from the data, and it costs the
machines for their setting-up and 25 steps at each batch size. Everything that was not measured is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._step_traces import FOLDERS, Samples, read, score
from hetopt.core.step_samples import Configuration
from hetopt.optimizer.exploring import Exploration, Measured, Stopped
from hetopt.optimizer.step_time.baselines import scavenger
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe

NODE_USD_PER_HOUR = 3.912
"""A machine with four T4 on demand (g4dn.12xlarge, us-east-1, 2026-07): taken for both clusters."""

SETUP_S = 180.0
STEPS = 25
BUDGET_USD = 20.0
MARKS_USD = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Errors on everything that was not measured, for so many dollars."""

    usd: float
    median: float
    p90: float


def price_usd(samples: Sequence[Configuration], step_times_s: Sequence[float]) -> float:
    """What a launch costs that measures these, all of one layout."""
    seconds = SETUP_S + STEPS * sum(step_times_s)
    return len(samples[0].nodes) * NODE_USD_PER_HOUR * seconds / 3600


def explored(everything: Samples) -> list[Spent]:
    """The course of one exploration, after each of its probes but the first, when there is a model."""
    by_layout: dict[object, list[int]] = {}
    for place, sample in enumerate(everything):
        by_layout.setdefault(sample.layout, []).append(place)

    def measure(configuration: Configuration) -> Measured:
        samples = tuple(everything[place] for place in by_layout[configuration.layout])
        return Measured(samples=samples, usd=price_usd(samples, [sample.step_time_s for sample in samples]))

    def price(configuration: Configuration, step_time_s: float | None) -> float:
        sizes = len(by_layout[configuration.layout])
        return price_usd([configuration], [step_time_s or 1.0] * sizes)

    search = Exploration(candidates=everything, price_usd=price, budget_usd=BUDGET_USD, catalog={})
    known: list[int] = []
    found, spent = list[Spent](), 0.0
    for event in search.run([], measure):
        if isinstance(event, Stopped):
            break
        known += by_layout[event.configuration.layout]
        spent += event.measured.usd
        shown = tuple(everything[place] for place in known)
        asked = tuple(everything[place] for place in sorted(set(range(len(everything))) - set(known)))
        if asked and len({sample.layout for sample in shown}) > 1:
            model = StepTimeModel.fit(observe(shown), {})
            one = score([told.step_time_s for told in model.predict(asked)], asked)
            found.append(Spent(usd=spent, median=one.median, p90=one.p90))
    return found


def partial(everything: Samples) -> Spent:
    """Scavenger's default search: the extremes of workers and batch sizes, and its regression through them."""
    few, many = min(s.workers for s in everything), max(s.workers for s in everything)
    shown: list[int] = []
    cost = 0.0
    for workers in (few, many):
        places = [place for place, sample in enumerate(everything) if sample.workers == workers]
        layout = everything[places[0]].layout
        ends = sorted(
            (place for place in places if everything[place].layout == layout),
            key=lambda place: max(everything[place].batch_sizes),
        )
        chosen = [ends[0], ends[-1]]
        cost += price_usd([everything[chosen[0]]], [everything[place].step_time_s for place in chosen])
        shown += chosen
    asked = tuple(sample for place, sample in enumerate(everything) if place not in shown)
    fitted = scavenger([everything[place] for place in shown])
    one = score(fitted.step_time_s(asked), asked)
    return Spent(usd=cost, median=one.median, p90=one.p90)


def full(everything: Samples) -> Spent:
    """Scavenger's grid search: everything is measured, and what its regression makes of it."""
    layouts: dict[object, list[int]] = {}
    for place, sample in enumerate(everything):
        layouts.setdefault(sample.layout, []).append(place)
    cost = sum(
        price_usd([everything[places[0]]], [everything[place].step_time_s for place in places])
        for places in layouts.values()
    )
    one = score(scavenger(everything).step_time_s(everything), everything)
    return Spent(usd=cost, median=one.median, p90=one.p90)


def none(everything: Samples, stored: Samples) -> Spent:
    """Scavenger without a search: the stored model of the same job, from another cluster."""
    one = score(scavenger(stored).step_time_s(everything), everything)
    return Spent(usd=0.0, median=one.median, p90=one.p90)


def probe_search(root: Path, *, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and baselines: means over the folders."""
    folders = FOLDERS[:2] if quick else FOLDERS
    # One sample a configuration: repeats would be measured for the price of one.
    data = {folder: _once(read(root, folder, "profile") + read(root, folder, "answers")) for folder in FOLDERS}
    courses = [explored(data[folder]) for folder in folders]
    figures: dict[str, float] = {}
    baselines: dict[str, float] = {}
    print("Probing: median / 90th percentile of the error in %, means over folders")
    for mark in MARKS_USD:
        reached = [max((s for s in course if s.usd <= mark), key=lambda s: s.usd, default=None) for course in courses]
        there = [one for one in reached if one is not None]
        if len(there) == len(courses):
            middle, p90 = _mean(there)
            print(f"hetopt, at most ${mark:<4g} {statistics.fmean(s.usd for s in there):>8.2f} $ {_said(middle, p90)}")
            figures[f"explored_{mark:g}_usd_median"], figures[f"explored_{mark:g}_usd_p90"] = middle, p90
    figures["explored_to_the_end_usd"] = round(statistics.fmean(course[-1].usd for course in courses), 2)
    searches = {
        "partial": [partial(data[folder]) for folder in folders],
        "full": [full(data[folder]) for folder in folders],
        "none": [none(data[folder], data[_elsewhere(folder)]) for folder in folders],
    }
    for name, found in searches.items():
        middle, p90 = _mean(found)
        usd = statistics.fmean(s.usd for s in found)
        print(f"Scavenger, {name:12}{usd:>8.2f} $ {_said(middle, p90)}")
        baselines[f"scavenger_{name}_median"], baselines[f"scavenger_{name}_p90"] = middle, p90
        baselines[f"scavenger_{name}_usd"] = round(usd, 2)
    return figures, baselines


def _elsewhere(folder: str) -> str:
    """The folder of the same job on the other cluster."""
    return next(o for o in FOLDERS if o != folder and o.split("-")[0] == folder.split("-")[0])


def _once(samples: Samples) -> Samples:
    seen: dict[object, list[float]] = {}
    for sample in samples:
        seen.setdefault((sample.layout, sample.batch_sizes), []).append(sample.step_time_s)
    kept = {(sample.layout, sample.batch_sizes): sample for sample in samples}
    return tuple(
        sample.model_copy(update={"step_time_s": statistics.median(seen[key]), "sync_time_s": None})
        for key, sample in kept.items()
    )


def _mean(found: Sequence[Spent]) -> tuple[float, float]:
    return (
        round(statistics.fmean(one.median for one in found), 4),
        round(statistics.fmean(one.p90 for one in found), 4),
    )


def _said(middle: float, p90: float) -> str:
    return f"{100 * middle:>6.1f} / {100 * p90:.1f}"
