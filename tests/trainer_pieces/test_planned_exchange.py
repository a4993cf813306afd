"""What a plan chose is what the trainer does: every option of the menu, through the plan's run to one exchange."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.cost import Operation
from hetopt.core.comm.options import Candidates, settled_collective
from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.profile import CompressorCost, Profile
from hetopt.core.run_rules import why_not_local
from hetopt.core.run_spec import Compression, RunSpec, Synchronization
from hetopt.optimizer.convergence.compression_penalty import Penalty
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.plan import Candidate, Goal, Group, Prediction, Range
from hetopt.optimizer.recommendation.candidates import run_spec
from hetopt.optimizer.search.exchange_menu import ExchangeOption, exchange_menu
from hetopt.optimizer.step_time.local_options import Communication, LocalOption
from hetopt.trainer.comm.methods import make_chain, make_residual
from hetopt.trainer.steps.adaptive_controller import AdaptiveController, is_steered
from hetopt.trainer.steps.step import autocast, matrices_in
from tests.optimizer.profiles import make_device, make_profile

from .test_steering import SLOW, network
from .thread_group import ThreadGroup

NUMEL = 20_400
WORKERS = 3


def measured() -> Profile:
    """A profile that has timed every method."""
    costs = tuple(
        CompressorCost(name=name, ratio=ratio, compress_s=1e-4, decompress_s=1e-5)
        for name, method in METHODS.items()
        for ratio in ((0.1, 0.001) if method.by_ratio else (1.0,))
    )
    device = make_device().model_copy(update={"compressors": costs})
    return make_profile(parameters=NUMEL, devices=[device])


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return fit(measured())


@pytest.fixture(scope="module")
def menu(model: FittedModel) -> tuple[ExchangeOption, ...]:
    return exchange_menu(model, minimum_gain=0.05, max_workers=8)


@pytest.fixture(scope="module")
def every_option(model: FittedModel) -> tuple[ExchangeOption, ...]:
    """What the menu has before what is beaten is dropped, with averages of parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetopt.optimizer.search.exchange_menu.drop_beaten", tuple)
        local = LocalOption(
            sync=Synchronization(name="selsync", delta=0.3),
            communication=Communication(share=1 / 8, log_sd=0.3, note=""),
            penalty=Penalty(coefficient=0.3, coefficient_sd=0.2),
            most_workers=24,
            counts_steps=True,
        )
        return exchange_menu(model, minimum_gain=0.05, max_workers=8, local=[local])


def planned(model: FittedModel, option: ExchangeOption, precision: Precision = "fp32") -> RunSpec:
    """The run of a plan that has chosen this option for three machines."""
    figure = Range(value=1, low=1, high=1)
    group = Group(
        instance_type="c7a.large", machines=WORKERS, market="spot", region="us-east-1", price_usd_per_hour=1,
        price_date="2026-01-01", price_source="a test", price_is_estimate=False, interruption_band=None,
        local_batch_sizes=(8,) * WORKERS, evidence="measured",
    )  # fmt: skip
    chosen = Candidate(
        groups=(group,),
        global_batch_size=8 * WORKERS,
        compression=option.compression,
        collective=settled_collective(option.compression),
        sync=option.sync,
        precision=precision,
        prediction=Prediction(
            step_time_s=figure, compute_s=1, communication_s=0, waiting_s=0, steps=figure, steps_source="a test",
            training_s=figure, startup_s=0, total_s=figure, cost_usd=figure, cost_terms=(),
        ),
    )  # fmt: skip
    return run_spec(model, Goal(ends="target"), chosen, seed=0, evaluate_every_epochs=1.0)


def test_the_menu_is_the_registry_or_says_why_not(
    menu: tuple[ExchangeOption, ...], every_option: tuple[ExchangeOption, ...]
) -> None:
    priced = {option.compression.name for option in every_option}
    for name in METHODS.keys() - priced:
        with pytest.raises(BadInput, match="was not measured"):
            exchange_menu(fit(measured()), minimum_gain=0.05, max_workers=8, names=[name])
    assert menu[0].is_plain
    assert {"fp16", "bf16", "int8", "int4", "topk", "mstopk"} <= priced
    strict = exchange_menu(fit(measured()), minimum_gain=0.9999, max_workers=4)
    assert "int8" not in {option.compression.name for option in strict}


def test_what_a_plan_chose_is_what_the_trainer_starts(
    model: FittedModel, every_option: tuple[ExchangeOption, ...]
) -> None:
    """Every option of the registry, from the plan to the first exchange of the run."""
    assert len(every_option) > 20
    for option in every_option:
        run, way = planned(model, option), option.compression
        assert (run.compression, run.sync) == (way, option.sync)
        assert make_chain(way, NUMEL) is not None  # refuses what does not go together
        if not METHODS[way.name].by_ratio:
            assert (run.ratio_policy, run.collective_policy) == ("fixed", "fixed")
            assert not is_steered(run, way)
            continue
        assert (run.ratio_policy, run.collective_policy) == ("auto", "cheapest")
        candidates = Candidates(asked=way, chooses_collective=True, numel=NUMEL, workers=WORKERS)
        begun = AdaptiveController(run, candidates, network(SLOW)).candidate.compression
        assert (begun.name, begun.ratio, begun.coding) == (way.name, way.ratio, way.coding)
        assert settled_collective(begun) == settled_collective(way)


@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_plans_precision_is_what_the_trainer_computes_in(
    model: FittedModel, every_option: tuple[ExchangeOption, ...], precision: Precision
) -> None:
    """Of every option but averages in fp16, which no plan has."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    for option in every_option:
        run = planned(model, option, precision)
        assert RunSpec.model_validate_json(run.model_dump_json()).precision == precision
        if option.sync.is_local:
            assert (why_not_local(run) is None) == (precision != "fp16")
    assert any(option.sync.is_local for option in every_option)
    with matrices_in(precision), autocast("cpu", precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
        assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")


def test_each_option_is_priced_by_what_one_exchange_really_sends(every_option: tuple[ExchangeOption, ...]) -> None:
    """Messages and bytes of the law, beside those of an exchange between three workers."""
    gradients = torch.randn(WORKERS, NUMEL, generator=torch.Generator().manual_seed(0))
    for option in every_option:
        if option.sync.is_local:
            continue
        sent = exchanged(option.compression, gradients)
        terms = [Operation(primitive=p, payload_bytes=size, members=WORKERS).terms() for p, size in sent]
        assert sum(t.messages for t in terms) == pytest.approx(option.messages[WORKERS]), option.compression
        traffic = sum(t.traffic_bytes for t in terms)
        assert traffic == pytest.approx(option.traffic_bytes[WORKERS], rel=0.01, abs=64), option.compression


def exchanged(way: Compression, gradients: torch.Tensor) -> list[tuple[str, int]]:
    group = ThreadGroup(WORKERS)

    def one(rank: int) -> list[tuple[str, int]]:
        channel = group.channel(rank)
        chain, residual = make_chain(way, NUMEL), make_residual(way, NUMEL)
        prepared = residual.prepare(gradients[rank].clone())
        chain.run(prepared, torch.empty(NUMEL), channel, 0)
        return [(message.primitive, message.payload_bytes) for message in channel.messages]

    with ThreadPoolExecutor(WORKERS) as pool:
        return next(iter(pool.map(one, range(WORKERS))))


def test_an_option_is_left_out_only_for_one_that_beats_it_in_everything(
    menu: tuple[ExchangeOption, ...], every_option: tuple[ExchangeOption, ...]
) -> None:
    kept = [option for option in menu if not option.sync.is_local]
    beaten = [option for option in every_option if not any(option.compression == k.compression for k in kept)]
    assert beaten
    for option in beaten:
        if option.sync.is_local:
            continue
        assert any(
            one.collective == option.collective
            and (one.messages <= option.messages).all()
            and (one.traffic_bytes <= option.traffic_bytes).all()
            and (one.compress_s <= option.compress_s).all()
            and one.compress_log_sd <= option.compress_log_sd
            and one.gain >= option.gain
            and one.under_backward >= option.under_backward
            for one in kept
        ), option.compression
