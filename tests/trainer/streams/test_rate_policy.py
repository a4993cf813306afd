"""Batches follow the rates, the learning rate follows the batches, and rates are drawn as published."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from hetopt.api.changes import on_stream, parse_stream
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec, Stream
from hetopt.trainer.policies.policy import BatchObservation, RateShares, stream_learning_rate_scale
from tests.trainer_pieces.runs import run_of


@given(rates=st.lists(st.floats(1e-3, 5000), min_size=1, max_size=6), data=st.data())
def test_shares_are_what_streams_bring_within_bounds(rates: list[float], data: st.DataObject) -> None:
    shares = tuple(data.draw(st.integers(1, 2000)) for _ in rates)
    policy = RateShares(stream=Stream(rates=tuple(rates), batch_interval_s=0.5, min_batch=8, max_batch=512), minimum=2)
    ones = (1.0,) * len(shares)
    seen = BatchObservation(local_batch_sizes=shares, compute_s=ones, spread_s=ones, steps=5, epoch=0)
    state, decision = policy.decide(policy.initial(), seen)
    assert decision.local_batch_sizes == tuple(max(8, min(512, round(rate * 0.5))) for rate in rates)
    assert decision.changed == (decision.local_batch_sizes != shares)
    # Whoever decides again from the same numbers changes nothing.
    assert not policy.decide(state, replace(seen, local_batch_sizes=decision.local_batch_sizes))[1].changed


@given(batch=st.integers(1, 10_000), planned=st.integers(1, 10_000), cap=st.floats(1, 50))
def test_the_learning_rate_follows_the_batch_up_to_its_cap(batch: int, planned: int, cap: float) -> None:
    ratio = batch / planned
    for rule, exact in (("fixed", 1.0), ("linear", ratio), ("sqrt", ratio**0.5)):
        stream = Stream.model_validate({"rates": (1.0,), "learning_rate": rule, "max_learning_rate_scale": cap})
        scale = stream_learning_rate_scale(stream, batch, planned)
        assert 1 / cap - 1e-9 <= scale <= cap + 1e-9
        if 1 / cap <= exact <= cap:
            assert scale == pytest.approx(exact)


def spec(**fields: object) -> RunSpec:
    return run_of(16, 16, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_policy": "rate"}, "follows streams, and the run has none"),
        ({"batches_per_step": 2}, "a task computes a step.s samples at once"),
        ({"stream": {"rates": (1.0,)}}, "1 rates of streams for 2 workers"),
        ({"stream": {"rates": (1.0, 0.0)}}, "greater than 0"),
        ({"stream": {"rates": ()}}, "at least 1 item"),
        ({"stream": {"rates": (1.0, float("inf"))}}, "finite"),
        ({"stream": {"rates": (1.0, 1.0), "min_batch": 9, "max_batch": 8}}, "must not exceed"),
        ({"stream": {"rates": (1.0, 1.0), "patience_s": 300}}, "shorter than the exchange timeout"),
    ],
)
def test_runs_that_cannot_be_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        spec(**fields)


# --- What a person types about streams, and what is said about what cannot be


def read(text: str) -> RunSpec:
    return on_stream(parse_stream(text), spec(), None)


def test_rates_are_given() -> None:
    given = read("replay(40/80,factor=2,buffer=truncation,interval=0.5,min=4,max=64,lr=sqrt,lr_cap=2,patience=9)")
    assert given.batch_policy == "rate"
    assert given.stream is not None
    assert given.stream.rates == (80.0, 160.0)
    assert (given.stream.buffer, given.stream.batch_interval_s, given.stream.patience_s) == ("truncation", 0.5, 9.0)
    assert (given.stream.min_batch, given.stream.max_batch) == (4, 64)
    assert (given.stream.learning_rate, given.stream.max_learning_rate_scale) == ("sqrt", 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kafka", "must be a replay of the task's data"),
        ("replay(", "a name with its values in parentheses"),
        ("replay", "needs rates"),
        ("replay(40,80)", "a value too many: '80'"),
        ("replay(0/4)", "greater than 0"),
        ("replay(x)", "each of its rates must be a number, got 'x'"),
        ("replay(4/8,key=cam)", "no option of replay called 'key'"),
        ("replay(1/2/3)", "3 rates of streams for 2 workers"),
        ("replay(4/8,buffer=forget)", "buffer must be"),
        ("replay(4/8,min=0)", "min_batch must be greater than 0"),
    ],
)
def test_what_cannot_be_is_said(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read(text)
