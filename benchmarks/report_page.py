"""How long a long run takes to become a page, how large that is, and what watching a run costs.

The log is that of 100,000 steps of sixteen workers: with an event for each of them (``dense``, the worst that a run
writes) and with one of twenty (``usual``). Times are of this process, from the log on disk to the text of the page; the
baseline is reading the same log with the standard library's json. Watching is processor time over two seconds of it.
"""

from __future__ import annotations

import io
import json
import math
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks._outcome import Results, options, publish, quartiles, run_benchmark
from hetopt.cli import render
from hetopt.cli.status import EVERY_S, picture
from hetopt.core.events.fold import RunHistory
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.profile import Profile
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports import html
from hetopt.reports.live_run import LiveRun
from hetopt.reports.report import make_report
from hetopt.reports.run_document import document

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded" / "digits.json"
STEPS, WORKERS = 100_000, 16
FORMS = {"dense": 1, "usual": 20}
MOST_S, MOST_BYTES, MOST_SHARE = 5.0, 3_000_000, 0.01


def write_log(path: Path, steps: int, together: int) -> None:
    """The log of a run of so many steps, with an event for so many of them together."""
    draw, now_s = random.Random(0), 1005.0
    hosts = [f"h{rank}" for rank in range(WORKERS)]
    spec = [{"host": host, "type": "g5.xlarge", "slowdown": 1, "local_batch_size": 64} for host in hosts]
    with path.open("w", encoding="utf-8") as stream:
        started = {"event": "run_started", "time_s": 1000.0, "task": "digits", "workers": spec}
        stream.write(json.dumps({**started, "global_batch_size": 64 * WORKERS}) + "\n")
        stream.write(json.dumps({"event": "training_started", "time_s": now_s, "step": 0}) + "\n")
        for step in range(together, steps + 1, together):
            compute = [round(0.1 + 0.01 * draw.random(), 7) for _ in hosts]
            step_time_s = round(max(compute) + 0.03, 7)
            now_s += together * step_time_s
            exchange = {"way": "topk 0.01 by all_gather", "ratio": 0.01, "gain": 0.3, "sent_bytes": 7860}
            event = {
                "event": "step", "time_s": now_s, "step": step, "epoch": step / 100, "samples_seen": step,
                "steps": together, "local_batch_sizes": [64] * WORKERS, "step_time_s": step_time_s,
                "compute_s": compute, "sync_s": [0.03] * WORKERS, "loss": 2 * math.exp(-3 * step / steps),
                "wait_s": [round(max(compute) - one, 7) for one in compute],
                "exchange": {**exchange, "dense_bytes": 393000, "compress_s": 0.001, "sync_s": 0.008},
            }  # fmt: skip
            stream.write(json.dumps(event) + "\n")


def make_launch() -> Launch:
    """A launch to hold the logs against; what it predicts does not matter here."""
    goal = Goal(budget_usd=2.0, ends="epochs", amount=100.0)
    moment = datetime(2026, 11, 20, tzinfo=UTC)
    plan = recommend(
        PlanRequest(Profile.load(RECORDED), load_catalog(), goal, Options(batch_size=256)), seed=0, now=moment
    )
    return Launch(
        created=moment.isoformat(),
        started_s=1000.0,
        run_id="a-long-run",
        on="local",
        plan=plan,
        spec=plan.run,
        prediction=plan.chosen.prediction,
    )


def page_s(path: Path, launch: Launch) -> tuple[float, int]:
    """Seconds to make the page of a log, and its bytes."""
    begun_s = time.perf_counter()
    history = RunHistory.of(read_log(path).events, launch.starts)
    text = html.page(document(make_report(launch, history, state="finished"), launch))
    return time.perf_counter() - begun_s, len(text.encode())


def json_s(path: Path) -> float:
    """Seconds to read a log with json alone."""
    begun_s = time.perf_counter()
    with path.open(encoding="utf-8") as stream:
        events = [json.loads(line) for line in stream]
    assert events
    return time.perf_counter() - begun_s


def watch_share(folder: Path, launch: Launch, pictures: int) -> float:
    """Part of a core that watching takes, an event a second; median over pictures."""
    lines = (folder / EVENTS_FILE).read_text(encoding="utf-8").splitlines()[: 2 + 2 * pictures]
    growing = folder / "growing"
    growing.mkdir(exist_ok=True)
    (growing / EVENTS_FILE).write_text("\n".join([*lines[:2], ""]), encoding="utf-8")
    watched = LiveRun.of(growing, launch)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    shares = []
    for start in range(2, len(lines), 2):
        with (growing / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            stream.write("\n".join([*lines[start : start + 2], ""]))
        begun_s = time.process_time()
        watched.read()
        fact = watched.facts(growing, RunStatus(state=RunState.RUNNING), now_s=2000.0)
        console.print(render.drawn(picture(watched, fact, now_s=2000.0)))
        shares.append((time.process_time() - begun_s) / EVERY_S)
    return quartiles(shares)[1]


def main() -> None:
    """Both forms in turn, round after round."""
    asked = options(__doc__)
    steps, rounds = (2_000, 2) if asked.smoke else (STEPS, 3 if asked.quick else 9)
    launch, results = make_launch(), Results()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.jsonl" for name in FORMS}
        for name, together in FORMS.items():
            write_log(paths[name], steps, together)
        times: dict[str, list[float]] = {name: [] for name in FORMS}
        plain: dict[str, list[float]] = {name: [] for name in FORMS}
        sizes = dict.fromkeys(FORMS, 0)
        for round_ in range(rounds):
            print(f"round {round_ + 1} of {rounds}", file=sys.stderr)
            for name, path in paths.items():
                took_s, sizes[name] = page_s(path, launch)
                times[name].append(took_s)
                plain[name].append(json_s(path))
        (Path(folder) / EVENTS_FILE).write_bytes(paths["usual"].read_bytes())
        share = watch_share(Path(folder), launch, 20 if asked.quick else 100)
    print(f"{'log':8}{'page, median':>14}{'quartiles':>20}{'json alone':>12}{'page':>10}")
    for name in FORMS:
        low, middle, high = quartiles(times[name])
        alone = quartiles(plain[name])[1]
        print(f"{name:8}{middle:>12.2f} s{low:>12.2f} – {high:.2f} s{alone:>10.2f} s{sizes[name] / 1e6:>7.2f} MB")
        results.goal(f"{name}_page_s", middle, at_most=MOST_S)
        results.goal(f"{name}_page_bytes", sizes[name], at_most=MOST_BYTES)
        results.baselines[f"{name}_json_s"] = round(alone, 4)
    print(f"watching takes {share:.2%} of a core")
    results.goal("watch_core_share", share, at_most=MOST_SHARE)
    publish(results.outcome("report_page", quick=asked.quick), asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
