"""Trainings whose hours were published, beside what `hetopt estimate` says of the same machines.

Each is described by its size alone, as `hetopt estimate` is told it, and asked for on the machines that it ran on. What
is compared with is one utilisation for each GPU, the median of public throughputs of large models, which is what people
multiply on an envelope. Of those on one machine, hours as published are rows that the law is fitted to
(`_utilisation_fit`), and a throughput that was turned into hours is a row of its source: only trainings that are not in
the file are held out. ``--quick`` is the same.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._gpu_throughput import folder
from benchmarks._outcome import Outcome, options, publish, run_benchmark
from hetopt.api.options import Described
from hetopt.api.planning import described
from hetopt.core.step_samples import Configuration, Node
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.model_counts import CONTRIBUTION
from hetopt.optimizer.search.asked_steps import AskedSteps

ENVELOPE = {"A100-40": 0.47 * 312e12, "A100-80": 0.47 * 312e12, "H100-80": 0.375 * 989e12}
"""Operations a second: the median share of the peak of llm-foundry's rows."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The predicted hours of a published training, beside the published ones.

    Attributes:
        log_ratio: log of predicted over published hours; ``envelope``: the same by one utilisation a GPU.
        width: factor of the 90 % interval to either side.
    """

    name: str
    log_ratio: float
    envelope: float
    width: float

    @property
    def is_inside(self) -> bool:
        """Return whether the published hours lie in the interval."""
        return abs(self.log_ratio) <= math.log(self.width)


def answers(path: Path) -> Iterator[Answer]:
    """Yield the prediction of every training in a file.

    Machines are those of the training; the model is described, not profiled.
    """
    catalog = load_catalog()
    for line in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        with tempfile.TemporaryDirectory() as written:
            job = described(_description(run, Path(written)), [catalog], now=datetime.datetime.now(datetime.UTC))
        each = catalog.instance_types[run["instance_type"]].cuda_devices
        used = min(each, run["gpus"])
        nodes = (Node(type=run["instance_type"], workers=used),) * (run["gpus"] // used)
        asked = Configuration(nodes=nodes, local_batch_size=max(1, run["batch_size"] // run["gpus"]))
        step = AskedSteps.of(job.profile, catalog).step(asked)
        steps, true_s = run["samples"] / run["batch_size"], 3600 * run["true_hours"]
        flops = CONTRIBUTION * job.model.forward_flops * run["samples"]
        yield Answer(
            name=run["name"],
            log_ratio=math.log(step.step_time_s * steps / true_s),
            envelope=math.log(flops / (ENVELOPE[run["gpu"]] * run["gpus"]) / true_s),
            width=step.step_time_high_s / step.step_time_s,
        )


def _description(run: dict[str, Any], written: Path) -> Described:
    """Return how a user would describe a training: by its parameters, or by a configuration file, which is written."""
    known = {"samples": run["samples"], "batch_size": run["batch_size"], "tokens": run["tokens"]}
    if run["params"] is not None:
        return Described(params=run["params"], **known)
    config = written / "config.json"
    config.write_text(json.dumps(run["config"]), encoding="utf-8")
    return Described(config=config, **known)


def main() -> None:
    """Print the table, record its figures, and publish.

    Exits where the published trainings are not at hand.
    """
    asked = options(__doc__)
    results = Outcome(benchmark="published", quick=asked.quick)
    data = folder()
    if data is None:
        raise SystemExit("the published trainings are not at hand")
    predictions = list(answers(data.parent / "published-trainings.jsonl"))
    print(f"{'training':34}{'predicted / published':>24}{'90 % interval':>16}{'envelope':>10}")
    for prediction in predictions:
        inside = "" if prediction.is_inside else "  outside"
        print(
            f"{prediction.name:34}{math.exp(prediction.log_ratio):24.2f}{f'x{prediction.width:.2f}':>16}{math.exp(prediction.envelope):10.2f}{inside}"
        )
    median, envelope = (
        math.exp(statistics.median(abs(getattr(prediction, name)) for prediction in predictions))
        for name in ("log_ratio", "envelope")
    )
    near = statistics.fmean(abs(prediction.log_ratio) <= math.log(1.5) for prediction in predictions)
    results.goal("median_ratio", median, at_most=1.25)
    results.goal("within_1_5", near, at_least=0.8)
    results.goal("coverage", statistics.fmean(prediction.is_inside for prediction in predictions), at_least=0.85)
    results.goal("median_width", statistics.median(prediction.width for prediction in predictions), at_most=2.0)
    results.figures["bias"] = math.exp(statistics.fmean(prediction.log_ratio for prediction in predictions))
    results.baselines["median_ratio_of_one_utilisation_a_gpu"] = envelope
    publish(results, asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
