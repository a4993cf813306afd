"""What a plan chose is what a launch starts: every option of the menu, in every precision, and what may be pinned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from hetopt.api.backends import backend, options_at
from hetopt.api.changes import in_precision
from hetopt.api.launching import Changes, prepare
from hetopt.backends.backend import Prepared
from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import whole_ways
from hetopt.core.errors import BadInput
from hetopt.core.interruption import Reporter
from hetopt.core.memory import Precision
from hetopt.core.profile import Profile
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.core.synchronization import Synchronization
from hetopt.optimizer.fit import fit
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation import recommend as recommending
from hetopt.optimizer.recommendation.options import Options, PlanRequest
from hetopt.optimizer.search.exchange_menu import ExchangeOption, Menu, exchange_menu, exchange_of

from .conftest import NOW
from .profiles import make_device, make_profile
from .test_exchange_losses import with_trials

MOST = 4
GOAL = Goal(ends="target", budget_usd=50.0)
FEW = Options(
    trials=0,
    only_types=("g5.xlarge",),
    max_workers=MOST,
    mixed_types=1,
    batch_size=64,
    objective="fastest",
)
TOLD = (
    "compression", "ratio_policy", "ratio_settings", "collective_policy", "sync", "precision", "slowdown_coefficient",
    "learning_rate_scale", "learning_rate_rule", "stop", "evaluate_every_epochs", "checkpoint_every_s", "seed", "task",
)  # fmt: skip


@cache
def known() -> Catalog:
    return load_catalog()


@cache
def profile() -> Profile:
    """A job on an A10G that several of them train faster, with every exchange priced, and steps in bf16 too."""
    usual, bf16 = (
        make_device(kind="cuda", type="g5.xlarge", fixed_s=0.001, per_sample_s=per_sample_s)
        for per_sample_s in (0.02, 0.01)
    )
    made = with_trials(make_profile(devices=[usual, bf16.model_copy(update={"precision": "bf16", "compressors": ()})]))
    host = made.host.model_copy(update={"accelerator": "NVIDIA A10G", "accelerator_count": 1})
    return made.model_copy(update={"host": host})


@cache
def options() -> tuple[ExchangeOption, ...]:
    """Everything that the menu may hold: what it holds, and all whole ways that others beat here."""
    model = fit(profile())
    held = exchange_menu(model, minimum_gain=0.05, max_workers=MOST).options
    local = replace(exchange_of(model, Compression(), MOST), sync=Synchronization(name="local-sgd", every_steps=8))
    return (*held, *(exchange_of(model, way, MOST) for way in whole_ways()), local)


@cache
def planned(way: str = "", precision: Precision = "fp32") -> Plan:
    """The fastest cluster, with nothing else on the menu than this."""
    with pytest.MonkeyPatch.context() as patch:
        if way:
            option = next(one for one in options() if name(one) == way)
            patch.setattr(recommending, "_menu", lambda *_, **__: Menu(options=(option,)))
        return recommending.recommend(
            PlanRequest(profile(), known(), GOAL, replace(FEW, precision=precision)), seed=0, now=NOW
        )


def name(option: ExchangeOption) -> str:
    return f"{spell(option.compression)} {option.sync.name}"


def launched(plan: Plan, on: Place = "local", **changes: str) -> Prepared:
    return prepare(plan, backend(on, Reporter()), options_at(on, {}), Changes(**changes))


def told(run: RunSpec) -> dict[str, object]:
    return {field: getattr(run, field) for field in TOLD}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", sorted({name(option) for option in options()}))
def test_what_was_chosen_is_what_is_started(way: str, precision: Precision) -> None:
    """From the menu's option to what workers are told, on this machine and in a rehearsal."""
    plan = planned(way, precision)
    option = next(one for one in options() if name(one) == way)
    assert plan.chosen.compression == plan.run.compression == option.compression
    assert plan.chosen.sync == plan.run.sync == option.sync
    assert plan.chosen.precision == plan.run.precision == precision
    assert len(plan.run.workers) > 1
    shares = [size for group in plan.chosen.groups for size in group.local_batch_sizes]
    assert [worker.local_batch_size for worker in plan.run.workers] == shares
    selects = METHODS[option.compression.name].by_ratio
    assert plan.run.ratio_policy == ("auto" if selects else "fixed")
    here = launched(plan).launch.spec
    rehearsed = rehearse(plan, ThisMachine(processors=8, operating_system="Linux")).run
    assert told(here) == told(rehearsed) == told(plan.run)
    assert here.global_batch_size == plan.chosen.global_batch_size
    assert [worker.local_batch_size for worker in rehearsed.workers] == shares


def test_the_same_precision_may_be_pinned_anywhere() -> None:
    plan = planned()
    assert launched(plan, precision="fp32").launch == launched(plan).launch


def test_another_precision_is_predicted_anew_where_nothing_is_rented() -> None:
    plan = planned()
    pinned = launched(plan, precision="bf16").launch
    assert pinned.spec.precision == "bf16"
    assert any("computes in fp32, this run in bf16" in note for note in pinned.notes)
    usual = launched(plan).launch
    assert usual.prediction.compute_s / pinned.prediction.compute_s == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("on", "changes", "said"),
    [
        ("ssh", {"precision": "bf16"}, "contradicts the plan"),
        ("local", {"precision": "fp16"}, "was not measured"),
        ("local", {"precision": "fp8"}, "fp8"),
        ("local", {"compression": "dense(0.01)"}, "ratio of identity must be 1"),
        ("local", {"compression": "none(0.01)"}, "ratio of identity must be 1"),
        ("local", {"compression": "powersgd(rank=2, ratio=0.1)"}, "ratio of powersgd must be 1"),
        ("local", {"compression": "dense", "ratio_policy": "gravac"}, "identity"),
        ("local", {"compression": "topk(0.01, rank=2)"}, "has no option rank"),
        ("local", {"compression": "sign(memory=error_feedback, collective=majority)"}, "majority"),
        ("local", {"compression": "auto", "ratio_policy": "gravac"}, "decides the ratio itself"),
    ],
)
def test_pins_that_contradict_are_refused_in_a_sentence(on: Place, changes: dict[str, str], said: str) -> None:
    plan = planned()
    ask = (
        partial(in_precision, plan, changes["precision"], on) if on == "ssh" else partial(launched, plan, on, **changes)
    )
    with pytest.raises(BadInput, match=said) as refused:
        ask()
    assert refused.value.message.endswith(".")
    assert "\n" not in refused.value.message


def test_a_method_that_this_version_lacks_is_named() -> None:
    plan = planned()
    run = plan.run.model_copy(update={"compression": Compression(name="telepathy")})
    with pytest.raises(BadInput, match="'telepathy', which this version of hetopt does not have"):
        launched(plan.model_copy(update={"run": run}))


@pytest.mark.parametrize("missing", ["gain", "noise", "exchange_trials", "precision_trials"])
def test_profiles_without_a_measurement_are_planned_without_it(missing: str) -> None:
    """What is not known is not chosen, and nothing else changes its way."""
    less = profile().model_copy(update={missing: ()})
    plan = recommending.recommend(PlanRequest(less, known(), GOAL, FEW), seed=0, now=NOW)
    assert plan.chosen.prediction.total_s.value > 0
    if missing == "gain":
        assert not METHODS[plan.chosen.compression.name].by_ratio
