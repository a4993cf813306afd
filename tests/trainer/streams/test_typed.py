"""What a person types about streams, and what is said about what cannot be."""

from __future__ import annotations

import pytest

from hetopt.api.changes import on_stream, parse_stream, waiting
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.plan import Prediction, Range


def run(**fields: object) -> RunSpec:
    workers = [{"host": f"h{rank}", "type": "local", "local_batch_size": 16} for rank in range(2)]
    return RunSpec.model_validate({"task": "digits", "workers": workers, "stop": {"max_steps": 5}, **fields})


def read(text: str, spec: RunSpec | None = None) -> RunSpec:
    return on_stream(parse_stream(text), spec or run(), None)


ONE = Range(value=1.0, low=1.0, high=1.0)


def counted(spec: RunSpec) -> tuple[Prediction, str]:
    """What becomes of a prediction of one step of a second."""
    times = dict.fromkeys(("step_time_s", "steps", "training_s", "total_s", "cost_usd"), ONE)
    return waiting(Prediction.model_construct(**times, waiting_s=0.0), spec)


def test_rates_may_be_given_or_drawn() -> None:
    given = read("replay(40/80,factor=2,buffer=truncation,interval=0.5,min=4,max=64,lr=sqrt,lr_cap=2,patience=9)")
    assert given.batch_policy == "rate"
    assert given.stream is not None
    assert given.stream.rates == (80.0, 160.0)
    assert (given.stream.buffer, given.stream.batch_interval_s, given.stream.patience_s) == ("truncation", 0.5, 9.0)
    assert (given.stream.min_batch, given.stream.max_batch) == (4, 64)
    assert (given.stream.learning_rate, given.stream.max_learning_rate_scale) == ("sqrt", 2.0)
    drawn = read(" replay( normal=64/24 ) ").stream
    assert drawn is not None
    assert len(drawn.rates) == 2
    assert drawn.rates != (64.0, 64.0)
    assert "bring 80 to 160 samples/s" in counted(given)[1]


def test_a_broker_is_named_with_its_key() -> None:
    spec = read("redis(redis://10.0.0.5:6379/1,key=cam,streams=3,group=g,delete=true)")
    assert spec.stream is not None
    assert (spec.stream.url, spec.stream.key, spec.stream.streams) == ("redis://10.0.0.5:6379/1", "cam", 3)
    assert spec.stream.delete_trained
    assert read("redis").stream is not None
    told, said = counted(spec)
    assert "also wait" in said
    assert told.total_s == ONE, "nobody knows how long"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kafka", "must name a source of samples"),
        ("replay(", "a name with its values in parentheses"),
        ("replay", "needs rates, said in one way"),
        ("replay(40,uniform=3/1)", "needs rates, said in one way"),
        ("replay(40,80)", "a value too many: '80'"),
        ("replay(0/4)", "needs positive numbers, got '0/4'"),
        ("replay(x)", "each of its rates must be a number, got 'x'"),
        ("replay(uniform=38)", "needs a mean and a standard deviation"),
        ("replay(4/8,key=cam)", "no option of replay called 'key'"),
        ("redis(buffer=truncation)", "no option of redis called 'buffer'"),
        ("redis(speed=3)", "no option of redis called 'speed'"),
        ("replay(1/2/3)", "3 rates of streams for 2 workers"),
        ("replay(4/8,buffer=forget)", "buffer must be"),
        ("replay(4/8,min=0)", "min_batch must be greater than 0"),
        ("redis(redis://:secret@h)", "must not stand in the address"),
    ],
)
def test_what_cannot_be_is_said(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read(text)
