"""The cheapest GPU chosen from one that was measured, judged by public throughputs: jobs on the GPUs that AWS rents.

A GPU is priced as the smallest machine that carries it; a menu is one job on all GPUs that it was measured on. The
posterior that predicts was fitted without the job.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks._decided import (
    ASKED,
    Belief,
    Chooser,
    Decision,
    Menu,
    as_believed,
    as_recommended,
    budgets,
    by_chance,
    by_median,
    decide,
    throughputs,
)
from benchmarks._gpu_fit import fit
from benchmarks._gpu_throughput import Column, read_columns
from benchmarks.transfer import (
    RENTED,
    RETIRED_USD_PER_HOUR,
    RULES,
    Answer,
    Models,
    by_median_ratio,
    by_rule,
    held_out,
    machine,
    type_name,
)
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.search.objective import Limits

SUITE = "aws"
RIVALS = {"peak rate": "peak FLOPs", "bandwidth": "memory bandwidth", "mean of both": "roofline's mean of both"}

Decided = dict[str, tuple[list[Decision], list[Decision]]]
"""By who decides: with a throughput or a deadline to keep, and with a budget."""


def gpu_decisions(data: Path, *, every: int) -> Decided:
    """Decisions about each job of the suite, or about one of ``every`` so many, from each of its GPUs."""
    columns = read_columns(data)
    scored = [column for column in columns if column.suite == SUITE][::every]
    types = {type_name(cell.place.gpu): machine(cell.place.gpu) for column in columns for cell in column.cells}
    prices = prices_per_hour()
    contenders = {"hetopt": held_out(fit(columns), scored, lambda column: column.job, Models(types=types).from_one)}
    contenders |= {words: by_rule(scored, RULES[rule]) for rule, words in RIVALS.items()}
    here = {id(column) for column in scored}
    contenders["median ratio of other jobs"] = [one for one in by_median_ratio(columns) if id(one.column) in here]
    ours = list(beliefs(contenders["hetopt"], prices))
    found: Decided = {"hetopt": _decisions([(menu, as_recommended(menu, told)) for menu, told in ours])}
    found["hetopt, ranked by medians"] = _decisions([(menu, by_median(menu, told)) for menu, told in ours])
    for asked in ASKED:
        chosen = [(menu, by_chance(menu, told, asked)) for menu, told in ours]
        found[f"hetopt, confidence {asked:g}"] = _decisions(chosen)
    for name, answers in contenders.items():
        if name != "hetopt":
            rivals = beliefs(answers, prices)
            found[name] = _decisions([(menu, as_believed(menu, told)) for menu, told in rivals])
    menus = [(column, menu_of(column, prices)) for column in scored for _ in column.cells]
    found["the biggest"] = _decisions([(menu, _first(-peaks(column))) for column, menu in menus])
    found["the cheapest per hour"] = _decisions([(menu, _first(menu.usd_per_s)) for _, menu in menus])
    return found


def prices_per_hour() -> dict[str, float]:
    """On demand, in dollars, by GPU."""
    catalog = load_catalog("us-east-1", None)
    found = {key: catalog.price(name, "on-demand") for key, name in RENTED.items()}
    return RETIRED_USD_PER_HOUR | {key: price.usd_per_hour for key, price in found.items() if price is not None}


def menu_of(column: Column, prices: Mapping[str, float]) -> Menu:
    """A job on its GPUs."""
    return Menu(
        seconds=np.array([cell.step_time_s / cell.place.batch_size for cell in column.cells]),
        usd_per_s=np.array([prices[cell.place.gpu.key] / 3600 for cell in column.cells]),
    )


def peaks(column: Column) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """TFLOP/s of its GPUs in the column's precision."""
    return np.array([cell.place.gpu.tflops(cell.place.precision) for cell in column.cells])


def beliefs(answers: Sequence[Answer], prices: Mapping[str, float]) -> Iterator[tuple[Menu, Belief]]:
    """What is believed of each job's GPUs from each of them; of that one, what was measured."""
    choices: dict[tuple[int, int], list[Answer]] = defaultdict(list)
    for one in answers:
        choices[id(one.column), one.source].append(one)
    for told in choices.values():
        menu = menu_of(told[0].column, prices)
        seconds, log_sd = menu.seconds.copy(), np.zeros(len(menu.seconds))
        for one in told:
            seconds[one.target] *= math.exp(one.error)
            log_sd[one.target] = one.half_width / Z90
        yield menu, Belief(seconds=seconds, log_sd=log_sd)


def _first(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Chooser:
    row = int(values.argmin())

    def chosen(limits: Limits) -> int:
        return row

    return chosen


def _decisions(asked: Sequence[tuple[Menu, Chooser]]) -> tuple[list[Decision], list[Decision]]:
    fast: list[Decision] = []
    cheap: list[Decision] = []
    for menu, chooser in asked:
        fast += decide(menu, throughputs(menu), chooser)
        cheap += decide(menu, budgets(menu), chooser)
    return fast, cheap
