"""Training with compressed gradients, by every published way: GraVAC on four compressors, its rivals, and dense sums.

Real processes train; what their steps take over links of any rate is added up from the bytes that were sent
(`benchmarks._priced_steps`). The target is what dense training ends with, or the rival if that ends with less, less
half a point or as much as dense seeds differ, whichever is more; beside it stands what counting alone achieves.
Speed-ups are pairs of runs with the same seed: the median, and the lowest and highest of them. Published ones are for
equal numbers of steps, whatever was learned by then: those are told as well.

GraVAC judges its factors by measured throughput, so it trains over links on which a dense sum takes five times as long
as a step computes. Its published window, 500 steps, is longer than these runs: here it is 25.

The last part is GraVAC's other claim, by itself: what it takes to select a tenth and then a thousandth, from the whole
gradient twice, or the second from the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks._contenders import DIGITS, MODELS, WORKERS, Contender, Model, Runs, hosts
from benchmarks._counted_text import counted_perplexity
from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._paired_runs import PairedRuns, end, note_pairs
from benchmarks._priced_steps import priced
from benchmarks._quality import data_folder
from benchmarks._rehearsal import Log, Side, need_namespaces, rehearse
from benchmarks._siblings import CHARACTERS, load_characters
from hetopt.core.policy_settings import Settings
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Turn
from hetopt.trainer.comm.elements import RandomElements
from hetopt.trainer.comm.levels import RandomSelection
from hetopt.trainer.comm.threshold import Dgc, RedSync
from hetopt.trainer.comm.topk import MultiLevel, Selection, TopK
from hetopt.trainer.data.fetch import TensorPairs

RATES = (1.0, 5.0, 20.0)
"""Time of a dense sum over that of a step's computation."""

SEARCHED_AT = 5.0

SEEDS = (0, 1, 2)
WINDOW = 25
GRAVAC: Settings = {"window": WINDOW}
FEEDBACK = "error_feedback"
"""What the released DGC has for a memory, and what goes with momentum in the optimizer."""


def _selected(name: str, ratio: float, **options: object) -> Contender:
    return Contender(compression=Compression.model_validate({"name": name, "ratio": ratio, **options}))


def _gravac(name: str) -> Contender:
    compression = Compression(name=name, ratio=0.001, memory=FEEDBACK)
    return Contender(compression=compression, ratio_policy="gravac", ratio_settings=GRAVAC, weighs_throughput=True)


DENSE, TENTH, ACCORDION = "dense", "topk 10x", "accordion"
OURS: Mapping[str, Contender] = {
    DENSE: Contender(),
    TENTH: _selected("topk", 0.1),
    "topk 1000x": _selected("topk", 0.001),
    ACCORDION: Contender(compression=Compression(name="topk", ratio=0.001), ratio_policy="accordion"),
    "gravac topk": _gravac("topk"),
    "gravac dgc": _gravac("dgc"),
    "gravac redsync": _gravac("redsync"),
    "gravac randomk": _gravac("randomk"),
}
OTHERS: Mapping[str, Contender] = {
    "max-norm": Contender(compression=Compression(name="qsgd_maxnorm")),
    "two scales": Contender(compression=Compression(name="qsgd_two_scale")),
    "global random-k": _selected("global_randomk_maxnorm", 0.1),
    "ar-topk 100x": _selected("topk", 0.01, collective="ar_topk_star"),
}
"""Of other papers, whose claims are about images."""

QUICK = (DENSE, TENTH, ACCORDION, "gravac topk")
SMOKE = (DENSE, TENTH)
LEVELS, STAND_IN = "levels", "digits"
PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "convnet": ("convnet", QUICK),
    "compressors": ("convnet", (DENSE, TENTH, "topk 1000x", "gravac dgc", "gravac redsync", "gravac randomk")),
    "quantisers": ("convnet", (DENSE, *OTHERS)),
    "characters": ("characters", tuple(OURS)),
}
"""What is trained in each, and by whom; any of them takes less than an hour on two cores."""

SELECTED_FROM, REPEATS, QUICK_REPEATS = 4_000_000, 9, 3
SELECTIONS: Mapping[str, Callable[[float], Selection]] = {
    "topk": TopK,
    "dgc": Dgc,
    "redsync": RedSync,
    "randomk": lambda ratio: RandomSelection(ratio, RandomElements(ratio)),
}
PUBLISHED = {"topk": (1.49, 1.83), "dgc": (1.27, 1.52), "redsync": (1.1, 1.5), "randomk": (1.34, 1.64)}
"""Lowest and highest of three models (arXiv 2305.12201, table 3)."""

CLAIMED = {"convnet": {"topk": 4.32, "accordion": 1.94}, "characters": {"topk": 6.67, "accordion": 2.06}}
"""Of GraVAC over Top-k 10x, and over Accordion (tables 2 and 4), of ResNet101 and the LSTM."""


def compare(model: Model, names: Sequence[str], *, quick: bool, seeds: Sequence[int]) -> PairedRuns:
    """Train all of them.

    Raises:
        RunFailed: a run failed.
    """
    found, everyone = PairedRuns(model=model, base=DENSE), {**OURS, **OTHERS}
    runs = Runs(model=model, quick=quick)
    quickly = [name for name in names if not everyone[name].weighs_throughput]
    logs = train(runs, {name: everyone[name] for name in quickly}, None, seeds)
    computed_s = statistics.median(max(event["compute_s"]) for event in logs[DENSE, seeds[0]] if "compute_s" in event)
    dense_bytes = next(event["exchange"]["dense_bytes"] for event in logs[DENSE, seeds[0]] if "exchange" in event)
    ring_bits = 8 * 2 * (WORKERS - 1) / WORKERS * dense_bytes
    weighing = {name: everyone[name] for name in names if name not in quickly}
    logs |= train(runs, weighing, ring_bits / (SEARCHED_AT * computed_s), seeds)
    found.runs = {name: [priced(logs[name, seed], model.job, WORKERS) for seed in seeds] for name in names}
    return found


def train(
    runs: Runs, contenders: Mapping[str, Contender], rate_bits_per_s: float | None, seeds: Sequence[int]
) -> dict[tuple[str, int], Log]:
    """The log of each contender and seed."""
    sides = {(name, seed): side(runs, name, each, seed) for name, each in contenders.items() for seed in seeds}
    logs = rehearse(hosts(rate_bits_per_s), list(sides.values()), rounds=1) if sides else {}
    return {key: logs[each.name][0] for key, each in sides.items()}


def side(runs: Runs, name: str, contender: Contender, seed: int) -> Side:
    """A whole run; where something is decided in every step, a control period is a step."""
    made = runs.side(f"{name}, seed {seed}", contender, seed=seed)
    if contender.ratio_policy == "fixed":
        return made
    return replace(made, spec=made.spec.model_copy(update={"control_period_steps": 1}))


def show(name: str, found: PairedRuns) -> None:
    """The table for people."""
    job, sign = found.model.job, 1 if found.model.job.higher_is_better else -1
    print(
        f"\n{name}: time to {job.metric} {sign * found.target():.4g}, {found.tolerance:.3g} short of dense training "
        f"(whose seeds are {found.spread:.3g} apart); speed-up over dense, lowest and highest seed"
    )
    print(f"{'':>16}" + "".join(f"{f'{rate:g}x':>22}" for rate in RATES) + f"{job.metric:>12}{'bytes':>9}")
    for contender in found.runs:
        cells = "".join(f"{found.told(contender, rate):>22}" for rate in RATES)
        ended = sign * found.ends_with(contender)
        print(f"{contender:>16}{cells}{ended:>12.4g}{found.sent(contender):>9.2%}")


def record(name: str, found: PairedRuns, results: Results) -> None:
    """Figures and goals of a model."""
    job, sign = found.model.job, 1 if found.model.job.higher_is_better else -1
    results.figures[f"{name}_target_{job.metric}"] = round(sign * found.target(), 4)
    results.figures[f"{name}_tolerance"] = round(found.tolerance, 4)
    results.baselines[f"{name}_{job.metric}_dense_still_gains_at_the_end"] = round(found.still_gains, 4)
    for contender in found.runs:
        place = results.figures if contender.startswith("gravac") else results.baselines
        ends = [sign * end(run) for run in found.runs[contender]]
        place[f"{name}_final_{job.metric}_{key(contender)}"] = round(statistics.fmean(ends), 4)
        place[f"{name}_final_{job.metric}_{key(contender)}_apart"] = round(max(ends) - min(ends), 4)
        place[f"{name}_sent_over_dense_{key(contender)}"] = round(found.sent(contender), 5)
        for rate in RATES:
            there = sum(each is not None for each in found.reached(contender, rate))
            place[f"{name}_seeds_that_get_there_{key(contender)}"] = there
            figure = f"{name}_{key(contender)}_over_dense_at_{rate:g}x"
            note_pairs(place, figure, found.speed_ups(contender, DENSE, rate))
            if contender != DENSE:
                equal = found.of_equal_steps(contender, DENSE, rate)
                place[f"{figure}_in_equal_steps"] = round(statistics.median(equal), 3)
    for contender in (each for each in found.runs if each.startswith("gravac")):
        for rival, short in ((TENTH, "topk"), (ACCORDION, "accordion")):
            if rival not in found.runs:
                continue
            for rate in RATES:
                ups = found.speed_ups(contender, rival, rate)
                figure = f"{name}_{key(contender)}_over_{key(rival)}_at_{rate:g}x"
                note_pairs(results.figures, figure, ups)
                equal = found.of_equal_steps(contender, rival, rate)
                results.figures[f"{figure}_in_equal_steps"] = round(statistics.median(equal), 3)
                if contender == "gravac topk" and rate == RATES[-1] and name in CLAIMED:
                    results.goal(figure, statistics.median(ups) if ups else 0.0, at_least=CLAIMED[name][short])


def count_text(results: Results) -> None:
    """What counting the same characters achieves on the same evaluation."""
    data, texts = load_characters(data_folder(MODELS["characters"].job)), []
    for pairs in (data.train, data.evaluation):
        assert isinstance(pairs, TensorPairs)
        texts.append(torch.cat((pairs.inputs.reshape(-1), pairs.targets.reshape(-1)[-1:])))
    print("perplexity of counts of n characters in a row:", end="")
    for order in (1, 2, 3, 4):
        found = counted_perplexity(texts[0], texts[1], symbols=CHARACTERS, order=order)
        results.baselines[f"characters_perplexity_of_counts_of_{order}"] = round(found, 4)
        print(f" {found:.2f}", end="")
    print()


def time_levels(results: Results, *, repeats: int, numel: int = SELECTED_FROM) -> None:
    """CPU time to select a tenth and a thousandth: both from the whole, and the second from the first; in turn."""
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0)) ** 3
    turn = Turn(Channel())
    print(
        f"\nCPU ms to select a tenth and a thousandth of {numel:,} elements: each from the whole, or one from the other"
    )
    for name, select in SELECTIONS.items():
        tenth, thousandth, nested = select(0.1), select(0.001), MultiLevel(select, 0.001, 0.1)

        def twice(tenth: Selection = tenth, thousandth: Selection = thousandth) -> None:
            tenth.encode(flat, turn)
            thousandth.encode(flat, turn)

        def in_levels(nested: MultiLevel = nested) -> None:
            nested.both(flat, turn)

        pairs = [(_cpu_s(twice), _cpu_s(in_levels)) for _ in range(repeats + 1)][1:]
        ratio = statistics.median(direct / levels for direct, levels in pairs)
        direct_s, levels_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:>10}{1e3 * direct_s:>10.1f}{1e3 * levels_s:>10.1f}  {ratio:.2f} times as fast")
        results.goal(f"levels_speed_up_{name}", ratio, at_least=PUBLISHED[name][0])
        results.baselines[f"levels_direct_ms_{name}"] = round(1e3 * direct_s, 2)


def _cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def key(name: str) -> str:
    """A name as a part of a figure's."""
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())


def main() -> None:
    """Measure and publish."""
    parts = (*PARTS, LEVELS)
    asked = options(__doc__, parts=parts)
    need_namespaces(or_skip=asked.smoke)
    torch.set_num_threads(1)
    results, quick = Results(), asked.quick
    for part in [asked.part] if asked.part else ([STAND_IN, LEVELS] if asked.smoke else parts):
        if part == LEVELS:
            numel = 100_000 if asked.smoke else SELECTED_FROM
            time_levels(results, repeats=QUICK_REPEATS if quick else REPEATS, numel=numel)
            continue
        name, everyone = PARTS.get(part, (part, SMOKE))
        model = MODELS.get(name, replace(DIGITS, quick_epochs=0.5))
        if data_folder(model.job) is None and model.job.data is not None:
            sys.exit(f"compression measures nothing: the data of {part} is not here (HETOPT_SHARED_DATA says where)")
        names = tuple(each for each in everyone if each in QUICK or each in OTHERS) if quick else everyone
        found = compare(model, names, quick=quick, seeds=SEEDS[:1] if asked.smoke else SEEDS)
        show(name, found)
        record(name, found, results)
        if part == "characters":
            count_text(results)
    publish(results.outcome("compression", quick=quick), asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
