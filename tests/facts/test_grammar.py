"""The grammar of options: records become text and the same record again; other text is refused in one sentence."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetopt.api import options as verbs
from hetopt.api.changes import parse_stream
from hetopt.api.planning import metric_target
from hetopt.backends import options as places
from hetopt.backends.emulation.plan import parse_change, parse_changes, parse_hosts
from hetopt.core import option
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.errors import BadInput
from hetopt.core.grammar import (
    COUNT,
    DURATION,
    FRACTION,
    MONEY,
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
from hetopt.core.hosts import Hours, parse_hosts as hosts_named, read_hosts
from hetopt.core.run_spec import (
    Injection,
    Partition,
    Stream,
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
    "local-sgd": {"every_steps": st.integers(1, 999)},
    "fedavg": {"participants": fractions, "every_epochs": positive},
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


@given(st.sampled_from(["global", "shards", "seldp"]), st.integers(1, 999))
def test_a_partition_is_read_as_it_is_written(plain: str, labels: int) -> None:
    for fields in ({"name": plain}, {"name": "labels", "labels": labels}):
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


@given(st.lists(rates, min_size=1, max_size=5), rates)
def test_a_stream_is_read_as_it_is_written(said: list[float], factor: float) -> None:
    stream = Stream(rates=tuple(factor * rate for rate in said), buffer="truncation", min_batch=4)
    rates = "/".join(map(repr, said))
    assert parse_stream(f"replay({rates}, buffer=truncation, min=4, factor={factor!r})") == stream


@pytest.mark.parametrize(
    ("read", "before", "now"),
    [
        (parse_compression, "topk:0.01,momentum=0.9", "topk(0.01, momentum=0.9)"),
        (parse_compression, "dgc:1000x", "dgc(0.1%)"),
        (parse_compression, "powersgd,rank=2", "powersgd(rank=2)"),
        (parse_sync, "selsync:auto,synchronised_share=0.1", "selsync(auto, share=10%)"),
        (parse_partition, "labels:1", "labels( labels = 1 )"),
        (parse_stream, "replay:40/80,age=60", "replay(40/80, age=1m)"),
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
        ("1_000_000", COUNT, 1e6),
        ("1,000,000", COUNT, 1e6),
        ("7 billion", COUNT, 7e9),
        ("6h", DURATION, 21600.0),
        ("1h30m", DURATION, 5400.0),
        ("3 days", DURATION, 259200.0),
        ("1 hour 30 minutes", DURATION, 5400.0),
        ("1 h 30 min", DURATION, 5400.0),
        ("$20", MONEY, 20.0),
        ("20", MONEY, 20.0),
        ("20$", MONEY, 20.0),
        ("20 usd", MONEY, 20.0),
        ("100mbit", RATE, 1e8),
        ("30%", FRACTION, 0.3),
        ("100x", FRACTION, 0.01),
    ],
)
def test_quantities(text: str, unit: Unit, value: float) -> None:
    assert quantity(text, unit, "it") == value


@pytest.mark.parametrize("text", ["", "h", "1h30", "1h-30m", "6 parsecs", "1_00", "nan", "inf", "$$2", "1e999"])
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
WORDS = "topk selsync local-sgd replay labels h1 step dies auto share speed rate momentum uniform spot g time cost"
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


@given(st.floats(0.01, 1e9), st.sampled_from(["", "$"]))
def test_amounts_are_read_with_commas_between_thousands(amount: float, sign: str) -> None:
    assert quantity(f"{sign}{amount:,.2f}", MONEY, "--budget") == pytest.approx(amount, abs=0.01)


# The record of owned machines: what a person may write, and one sentence for all that cannot be.

WHOLE = """
usd_per_kwh = 0.3
user = "alice"

[box1]
address = "box1.lan"
devices = ["RTX 3090", "GTX 1080 Ti"]
kw = 0.5
hours = "18:00-08:00, 12:00-13:00"
private = "10.0.0.5"

[box2]
user = "bob"
port = 2222
jump = "carol@gateway:22,relay"
usd_per_hour = 0.1
"""


def in_file(folder: Path, text: str) -> Path:
    path = folder / "hosts.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_stands_above_the_tables_holds_for_all(tmp_path: Path) -> None:
    first, second = read_hosts(in_file(tmp_path, WHOLE))
    assert (first.name, first.address, first.user, first.port) == ("box1", "box1.lan", "alice", None)
    assert first.devices == ("RTX 3090", "GTX 1080 Ti")
    assert first.cost_usd_per_hour == pytest.approx(0.15)
    assert (second.address, second.user, second.port, second.jump) == ("box2", "bob", 2222, "carol@gateway:22,relay")
    assert second.devices == ("cpu",)
    assert second.cost_usd_per_hour == 0.1


def test_hosts_of_a_command_line() -> None:
    one, two, three = hosts_named("alice@box1, bob@box2.lan:2222,10.0.0.7")
    assert (one.user, one.address, one.port) == ("alice", "box1", None)
    assert (two.name, two.user, two.address, two.port) == ("box2.lan", "bob", "box2.lan", 2222)
    assert (three.user, three.address) == (None, "10.0.0.7")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must name 1 to 256 hosts"),
        ("[box1]\ncolour = 'red'", "no setting of a host .* called 'colour'"),
        ("[box1]\naddress = '-oProxyCommand=reboot'", "address must be"),
        ("[box1]\naddress = '10.0.0.5:2222'", "a host's name or number alone, such as .*, got '10.0.0.5:2222'"),
        ("[box1]\naddress = 'alice@box1.lan'", "a host's name or number alone, such as .*, got 'alice@box1.lan'"),
        ("[box1]\n[box1]", "must be TOML"),
        ("[box1]\nuser = '-l'", "user must be"),
        ("[box1]\njump = 'a b'", "jump must be"),
        ("[box1]\nport = 70000", "port must be less than or equal to 65535, got 70000"),
        ("[box1]\nport = true", "port must be"),
        ("[box1]\nkw = -1", "kw must be greater than 0, got -1"),
        ("[box1]\nkw = 1", "`kw` needs the price of that"),
        ("[box1]\nkw = 1\nusd_per_kwh = 1\nusd_per_hour = 1", "both"),
        ("[box1]\nhours = '18-8'", "hours must be from when to when"),
        ("[box1]\nhours = '18:00-18:00'", "hours must be from when to when"),
        ("[box1]\nprivate = '8.8.8.8'", "private must be its address in a private network"),
        ("[box1]\nprivate = '0.0.0.0'", "private must be the address of one machine"),
        ("[box1]\ndevices = []", "devices must have at least 1 item"),
        ("[box1]\ndevices = ['cpu', 'L4']", "GPUs, or cpu"),
        ("['../box']\nuser = 'a'", "name must be of letters"),
        ("[a]\naddress='x'\n[b]\naddress='x'", "more than one host is reached as x"),
        ("[box1", "must be TOML"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as refused:
        read_hosts(in_file(tmp_path, text))
    assert refused.value.hint


@pytest.mark.parametrize("text", ["", "alice@", "box1;box2", "-oX", "a@b@c", "box1,box1", "box:0x"])
def test_a_command_line_that_names_no_hosts(text: str) -> None:
    with pytest.raises(BadInput, match="`hosts`"):
        hosts_named(text)


@given(begin=st.integers(0, 1439), end=st.integers(0, 1439), minute=st.integers(0, 1439))
def test_hours_and_the_rest_of_the_day_are_the_day(begin: int, end: int, minute: int) -> None:
    if begin == end:
        return

    def clock(at: int) -> str:
        return f"{at // 60:02}:{at % 60:02}"

    moment = datetime.datetime(2026, 3, 1, minute // 60, minute % 60)
    inside = Hours.model_validate(f"{clock(begin)}-{clock(end)}").has(moment)
    assert inside is not Hours.model_validate(f"{clock(end)}-{clock(begin)}").has(moment)
