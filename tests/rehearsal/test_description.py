"""What people may write about a rehearsed cluster, what it means, and how it is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.emulation.description import (
    describe,
    format_rate,
    parse_change,
    parse_changes,
    parse_hosts,
)
from hetopt.backends.emulation.namespaces import MOST_HOSTS, host_address
from hetopt.core.errors import BadInput
from hetopt.core.grammar import RATE, quantity
from hetopt.core.scaled_emulation import Change, EmulatedHost


def rate_of(text: str) -> float:
    return quantity(text, RATE, "rate")


HOSTS = ("h0", "h1", "h2", "h3")

values = st.floats(1e-3, 1e6).map(lambda value: float(f"{value:.6g}"))
rates = st.floats(1, 1e12).map(lambda value: float(f"{value:.6g}"))


def test_a_description_names_its_hosts_in_order() -> None:
    described = parse_hosts("speed=1,rate=100mbit x2; speed=0.25, rate=25mbit, workers=2, noise=0.05 x1; cpu=0.5;")
    assert [one.host for one in described] == [
        EmulatedHost(name="h0", speed=1, rate_bits_per_s=100e6),
        EmulatedHost(name="h1", speed=1, rate_bits_per_s=100e6),
        EmulatedHost(name="h2", speed=0.25, rate_bits_per_s=25e6, workers=2),
        EmulatedHost(name="h3", cpu_cores=0.5),
    ]
    assert [one.noise for one in described] == [0, 0, 0.05, 0]


def test_twelve_hosts_keep_their_order_by_name_and_by_address() -> None:
    hosts = [one.host for one in parse_hosts("; ".join(f"speed={n + 1}" for n in range(12)))]
    assert [host.name for host in hosts] == [f"h{n}" for n in range(12)]
    assert [host.speed for host in hosts] == list(range(1, 13))
    addresses = [host_address(place) for place in range(MOST_HOSTS)]
    assert sorted(addresses) == addresses  # torchrun ranks nodes by their addresses as text
    assert len(set(addresses)) == MOST_HOSTS
    assert addresses[-1].endswith(".254")


@given(values, st.none() | rates, st.none() | values, st.integers(1, 99), st.floats(0, 0.99))
def test_describing_a_host_is_the_inverse_of_parsing_it(
    speed: float, rate: float | None, cpu: float | None, workers: int, noise: float
) -> None:
    host = EmulatedHost(name="h0", speed=speed, rate_bits_per_s=rate, cpu_cores=cpu, workers=workers)
    [again] = parse_hosts(describe(host, noise))
    assert again.host.model_copy(update={"rate_bits_per_s": None}) == host.model_copy(update={"rate_bits_per_s": None})
    assert again.host.rate_bits_per_s == (None if rate is None else pytest.approx(rate, rel=1e-9))
    assert again.noise == pytest.approx(noise, rel=1e-5)


@given(rates)
def test_formatting_a_rate_is_the_inverse_of_parsing_it(rate: float) -> None:
    assert rate_of(format_rate(rate)) == pytest.approx(rate, rel=1e-9)


def test_rates_are_bits_a_second() -> None:
    assert rate_of("25mbit") == 25e6
    assert rate_of("1.5Gbit") == 1.5e9
    assert rate_of(" 100kbit ") == 1e5
    assert rate_of("1000000") == 1e6
    assert rate_of("1e6") == 1e6
    assert format_rate(25e6) == "25mbit"
    assert format_rate(1.6e9) == "1.6gbit"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the description names no host."),
        (" ; ", "the description names no host."),
        ("x2", "host 'x2' has a value too many: 'x2'."),
        ("speed=0", "host 'speed=0': speed must be greater than 0, got '0'."),
        ("speed=-1 x2", "host 'speed=-1': speed must be greater than 0, got '-1'."),
        ("speed=fast", "host 'speed=fast': speed must be a number, got 'fast'."),
        ("speed=nan", "host 'speed=nan': speed must be a number, got 'nan'."),
        ("speed=1e999", "host 'speed=1e999': speed must be a number, got '1e999'."),
        ("speed=1,speed=2", "host 'speed=1,speed=2' says twice what speed is."),
        ("sped=1", "There is no option of host 'sped=1' called 'sped'."),
        ("rate=0mbit", "host 'rate=0mbit': rate must be greater than 0, got '0mbit'."),
        ("rate=-5mbit", "host 'rate=-5mbit': rate must be greater than 0, got '-5mbit'."),
        ("rate=5mbps", "host 'rate=5mbps': rate must be a link rate, got '5mbps'."),
        ("rate=mbit", "host 'rate=mbit': rate must be a link rate, got 'mbit'."),
        ("rate=1..5mbit", "host 'rate=1..5mbit': rate must be a link rate, got '1..5mbit'."),
        ("rate=1e300gbit", "host 'rate=1e300gbit': rate must be at most 1000gbit, got '1e300gbit'."),
        ("cpu=0", "host 'cpu=0': cpu must be greater than 0, got '0'."),
        ("workers=0", "host 'workers=0': workers must be greater than 0, got '0'."),
        ("workers=1.5", "host 'workers=1.5': workers must be a valid integer, got '1.5'."),
        ("noise=1", "host 'noise=1': noise must be less than 1, got '1'."),
        ("speed=1 x0", "'speed=1 x0' asks for no host at all."),
        ("speed=1 x99999999", "a rehearsal must have at most 154 hosts, got 99999999."),
        ("speed=1 x100; speed=2 x55", "a rehearsal must have at most 154 hosts, got 155."),
    ],
)
def test_a_bad_description_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_hosts(text)
    assert refused.value.message == sentence
    assert refused.value.hint


def test_a_schedule_says_when_who_and_what() -> None:
    changes = parse_changes(
        """
        # drift, congestion, failure
        30s h2 speed=0.25 rate=10mbit
        step 500 * rate=10mbit     # everybody
        1.5m h1 speed=2,rate=1gbit
        step 40 h3 dies
        """,
        HOSTS,
    )
    assert changes == (
        Change(host="h2", at_s=30, speed=0.25, rate_bits_per_s=1e7),
        Change(host="*", at_step=500, rate_bits_per_s=1e7),
        Change(host="h1", at_s=90, speed=2, rate_bits_per_s=1e9),
        Change(host="h3", at_step=40, dies=True),
    )
    assert parse_change("h2 speed=0.25", HOSTS) == Change(host="h2", speed=0.25)
    assert parse_change(" * dies ", HOSTS) == Change(host="*", dies=True)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("h2 speed=1", "line 2 ('h2 speed=1') does not say when."),
        ("30s", "line 2 ('30s') names no host."),
        ("30s h2", "line 2 ('30s h2') does not say what happens to h2."),
        ("30s h9 dies", "line 2 ('30s h9 dies') names the host 'h9'; there is h0, h1, h2, h3."),
        ("30s h2 dead", "There is no change in line 2 ('30s h2 dead') called 'dead'."),
        ("30s h2 speed=0", "line 2 ('30s h2 speed=0'): speed must be greater than 0, got '0'."),
        ("30s h2 rate=much", "line 2 ('30s h2 rate=much'): rate must be a link rate, got 'much'."),
        ("30s h2 workers=2", "There is no option of line 2 ('30s h2 workers=2') called 'workers'."),
        ("30s h2 speed=1 speed=2", "line 2 ('30s h2 speed=1 speed=2') says twice what speed is."),
        ("-3s h2 dies", "line 2 ('-3s h2 dies'): at must be greater than or equal to 0, got '-3s'."),
        ("30 h2 dies", "line 2 ('30 h2 dies'): at must be a length of time, got '30'."),
        ("step h2 dies", "line 2 ('step h2 dies'): step must be a whole number, got 'h2'."),
        ("step 1.5 h2 dies", "line 2 ('step 1.5 h2 dies'): step must be a whole number, got '1.5'."),
    ],
)
def test_a_bad_line_of_a_schedule_is_named(line: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_changes(f"1s h1 dies\n{line}\n", HOSTS)
    assert refused.value.message == sentence
    assert refused.value.hint


@given(st.text(max_size=40))
def test_whatever_is_written_is_understood_or_refused(text: str) -> None:
    for read in (
        parse_hosts,
        rate_of,
        lambda text: parse_changes(text, HOSTS),
        lambda text: parse_change(text, HOSTS),
    ):
        with contextlib.suppress(BadInput):
            read(text)


@given(st.text(alphabet="0123456789.-+einfxsmgbt=;, *hspeedrate\n", max_size=30))
def test_what_looks_almost_right_is_understood_or_refused(text: str) -> None:
    test_whatever_is_written_is_understood_or_refused.hypothesis.inner_test(text)
