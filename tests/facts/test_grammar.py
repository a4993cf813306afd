"""The grammar of options: records become text and the same record again; other text is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hetopt.api import options as verbs
from hetopt.api.changes import StreamWish, parse_stream
from hetopt.api.planning import metric_target
from hetopt.backends import options as places
from hetopt.backends.emulation.description import parse_change, parse_changes, parse_hosts
from hetopt.core import option
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.errors import BadInput
from hetopt.core.grammar import (
    COUNT,
    DURATION,
    FRACTION,
    MONEY,
    PERCENT,
    RATE,
    Unit,
    arguments,
    call,
    numbers,
    quantity,
    repeated,
    split,
    written,
)
from hetopt.core.synchronization import (
    Injection,
    Partition,
    Synchronization,
    parse_injection,
    parse_partition,
    parse_sync,
    spell_partition,
    spell_sync,
)
from hetopt.optimizer.market.quota import FAMILIES, UNBOUNDED, Bucket, read_quotas, write_quotas

fractions = st.floats(0, 1, exclude_min=True)
positive = st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False)

OWN = {
    "bsp": {},
    "auto": {},
    "local-sgd": {"every_steps": st.integers(1, 999), "rate_power": st.floats(0, 9)},
    "fedavg": {"participants": fractions, "every_epochs": positive},
    "ssp": {"staleness": st.integers(0, 999)},
    "selsync": {
        "delta": st.floats(0, 9) | st.sampled_from(["auto", "never"]),
        "synchronised_share": st.floats(0, 1, exclude_min=True, exclude_max=True),
        "votes": st.sampled_from(["any", "majority", "quantile"]),
        "quorum": fractions,
        "max_local_steps": st.none() | st.integers(1, 999),
        "window": st.integers(1, 999),
        "smoothing": fractions,
        "vote_lag": st.integers(0, 1),
    },
}
AVERAGED = {
    "momentum": st.sampled_from(["keep", "average", "reset"]),
    "buffers": st.sampled_from(["average", "keep"]),
    "stretch": positive,
}


@st.composite
def syncs(draw: st.DrawFn) -> Synchronization:
    name = draw(st.sampled_from(sorted(OWN)))
    fields = {**OWN[name], **(AVERAGED if name in ("local-sgd", "fedavg", "selsync") else {})}
    return Synchronization.model_validate({"name": name, **draw(st.fixed_dictionaries({}, optional=fields))})


@given(syncs())
def test_a_synchronisation_is_read_as_it_is_written(sync: Synchronization) -> None:
    assert parse_sync(spell_sync(sync)) == sync


@given(st.sampled_from(["global", "shards", "seldp"]), st.integers(1, 999), positive)
def test_a_partition_is_read_as_it_is_written(plain: str, labels: int, alpha: float) -> None:
    for fields in ({"name": plain}, {"name": "labels", "labels": labels}, {"name": "dirichlet", "alpha": alpha}):
        partition = Partition.model_validate(fields)
        assert parse_partition(spell_partition(partition)) == partition


@given(fractions, fractions)
def test_an_injection_is_read_as_it_is_written(workers: float, samples: float) -> None:
    assert parse_injection(f"{workers!r}, {samples!r}") == Injection(workers=workers, samples=samples)


buckets = st.builds(Bucket, market=st.sampled_from(["spot", "on-demand"]), family=st.sampled_from(FAMILIES))


@given(st.dictionaries(buckets, st.integers(0, UNBOUNDED - 1), min_size=1))
def test_quotas_are_read_as_they_are_written(quotas: dict[Bucket, int]) -> None:
    p, p5 = (Bucket(market="spot", family=family) for family in ("p", "p5"))
    # Who says P alone means all of P, though AWS counts P5 apart as spot.
    meant = {p5: quotas[p], **quotas} if p in quotas else quotas
    assert read_quotas([write_quotas(quotas)]) == meant


rates = st.floats(1e-3, 1e6)


@given(st.lists(rates, min_size=1, max_size=5) | st.tuples(st.sampled_from(["uniform", "normal"]), rates, rates), rates)
def test_a_stream_is_read_as_it_is_written(said: object, factor: float) -> None:
    drawn = {"drawn": said} if isinstance(said, tuple) else {"rates": tuple(said)}  # type: ignore[call-overload]
    stream = StreamWish(source="replay", fields={"buffer": "truncation", "min_batch": "4"}, factor=factor, **drawn)
    rates = f"{said[0]}={said[1]!r}/{said[2]!r}" if isinstance(said, tuple) else "/".join(map(repr, stream.rates))
    assert parse_stream(f"replay({rates}, buffer=truncation, min=4, factor={factor!r})") == stream
    broker = StreamWish(source="redis", fields={"url": "redis://10.0.0.5:6379/1?timeout=3", "key": "cam"})
    assert parse_stream("redis(redis://10.0.0.5:6379/1?timeout=3, key=cam)") == broker


@pytest.mark.parametrize(
    ("read", "before", "now"),
    [
        (parse_compression, "topk:0.01,momentum=0.9", "topk(0.01, momentum=0.9)"),
        (parse_compression, "dgc:1000x", "dgc(0.1%)"),
        (parse_compression, "powersgd,rank=2", "powersgd(rank=2)"),
        (parse_sync, "selsync:auto,synchronised_share=0.1", "selsync(auto, share=10%)"),
        (parse_partition, "labels:1", "labels( labels = 1 )"),
        (parse_stream, "replay:40/80,age=60", "replay(40/80, age=1m)"),
        (parse_stream, "redis:redis://h:1/0,key=cam", "redis(redis://h:1/0, key=cam)"),
        (parse_hosts, "speed=1,rate=100mbit x2; speed=0.25", "speed=1 rate=0.1gbit; speed=1, rate=1e8; speed=0.25;"),
        (partial(option.names, name="types"), "g5.*,c7a.*", " g5.* ; c7a.*, "),
        (partial(places.slowdowns, name="slowdowns"), "1,1,2", "1 x2, 2"),
        (partial(verbs.time_weight, name="time_weight"), "time=2,cost=1", "cost = 1, time = 2"),
        (metric_target, "accuracy=0.97", " accuracy = .97"),
    ],
)
def test_what_was_written_before_is_still_understood(read: Callable[[str], object], before: str, now: str) -> None:
    assert read(before) == read(now)
    assert read(now)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("110M", COUNT, 1.1e8),
        ("7 b", COUNT, 7e9),
        ("3e6", COUNT, 3e6),
        ("2k", COUNT, 2000.0),
        ("6h", DURATION, 21600.0),
        ("1h30m", DURATION, 5400.0),
        ("1 h 30 min", DURATION, 5400.0),
        ("$20", MONEY, 20.0),
        ("20", MONEY, 20.0),
        ("100mbit", RATE, 1e8),
        ("30%", FRACTION, 0.3),
        ("100x", FRACTION, 0.01),
        ("30%", PERCENT, 0.3),
        ("30", PERCENT, 0.3),
    ],
)
def test_quantities(text: str, unit: Unit, value: float) -> None:
    assert quantity(text, unit, "it") == value


@pytest.mark.parametrize("text", ["", "h", "1h30", "1h-30m", "6 parsecs", "1_000", "nan", "inf", "$$2", "1e999"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    for unit in (COUNT, DURATION, MONEY, RATE, FRACTION):
        with pytest.raises(BadInput, match="it must be"):
            quantity(text, unit, "it")


def test_parts_are_split_outside_parentheses() -> None:
    assert split("a(1,2), b", ",", "it") == ["a(1,2)", "b"]
    assert call("a(b(1, c=2), d=e)", "it").values == ("b(1, c=2)",)
    assert call(" a ", "it") == call("a()", "it") == arguments("", "it", name="a")
    assert repeated("speed=1 x2") == ("speed=1", 2)
    assert numbers("1, 2 x3", "it") == (1, 2, 2, 2)
    assert written("a", [0.5, 2.0], {"b": True}) == "a(0.5, 2, b=true)"


READERS: tuple[Callable[[str], object], ...] = (
    parse_compression,
    parse_sync,
    parse_partition,
    parse_injection,
    parse_hosts,
    parse_stream,
    lambda text: parse_changes(text, ("h0", "h1")),
    lambda text: parse_change(text, ("h0", "h1")),
    lambda text: read_quotas([text]),
    partial(places.slowdowns, name="slowdowns"),
    partial(verbs.time_weight, name="time_weight"),
    metric_target,
    lambda text: option.duration_s(text, "deadline"),
    lambda text: option.positive(text, "budget_usd", "USD"),
    partial(option.names, name="types"),
)
WORDS = (
    "topk selsync local-sgd replay redis labels h1 step dies auto share speed rate momentum uniform spot g time cost"
)
NUMBERS = "0 1 -1 0.5 1e9 nan inf 30s 100mbit 100x $2 x2"
PIECES = st.sampled_from([*WORDS.split(), *NUMBERS.split(), "9" * 400, *"(),;:=/ \n%*'\u00e9\x00["])


@given(st.text(max_size=40) | st.lists(PIECES, max_size=12).map("".join))
def test_any_text_is_understood_or_refused_in_one_sentence(text: str) -> None:
    for refused in filter(None, (refusal(read, text) for read in READERS)):
        assert refused.message.endswith(".")
        assert refused.hint
        assert "\n" not in refused.message


def refusal(read: Callable[[str], object], text: str) -> BadInput | None:
    try:
        read(text)
    except BadInput as refused:
        return refused
    return None


def test_a_sentence_names_parameter_rule_value_and_next_step() -> None:
    with pytest.raises(BadInput) as refused:
        parse_compression("topk:2", option="--compression")
    assert refused.value.message == "--compression: ratio must be less than or equal to 1, got '2'."
    assert refused.value.hint
    assert not isinstance(refused.value.__cause__, ValidationError)


@given(st.floats(0.01, 1e9), st.sampled_from(["", "$"]))
def test_amounts_are_read_with_commas_between_thousands(amount: float, sign: str) -> None:
    assert quantity(f"{sign}{amount:,.2f}", MONEY, "--budget") == pytest.approx(amount, abs=0.01)


@pytest.mark.parametrize("text", ["1,5", "1,00", ",5", "1,0000"])
def test_other_commas_are_no_amount(text: str) -> None:
    with pytest.raises(BadInput, match="must be an amount in USD"):
        quantity(text, MONEY, "--budget")
