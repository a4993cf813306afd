"""The record of owned machines: what a person may write, and one sentence for all that cannot be."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.hosts import Hours, parse_hosts, read_hosts

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


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_stands_above_the_tables_holds_for_all(tmp_path: Path) -> None:
    first, second = read_hosts(written(tmp_path, WHOLE))
    assert (first.name, first.address, first.user, first.port) == ("box1", "box1.lan", "alice", None)
    assert first.devices == ("RTX 3090", "GTX 1080 Ti")
    assert first.cost_usd_per_hour == pytest.approx(0.15)
    assert (second.address, second.user, second.port, second.jump) == ("box2", "bob", 2222, "carol@gateway:22,relay")
    assert second.devices == ("cpu",)
    assert second.cost_usd_per_hour == 0.1


def test_hosts_of_a_command_line() -> None:
    one, two, three = parse_hosts("alice@box1, bob@box2.lan:2222,10.0.0.7")
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
        read_hosts(written(tmp_path, text))
    assert refused.value.hint


@pytest.mark.parametrize("text", ["", "alice@", "box1;box2", "-oX", "a@b@c", "box1,box1", "box:0x"])
def test_a_command_line_that_names_no_hosts(text: str) -> None:
    with pytest.raises(BadInput, match="`hosts`"):
        parse_hosts(text)


@given(begin=st.integers(0, 1439), end=st.integers(0, 1439), minute=st.integers(0, 1439))
def test_hours_and_the_rest_of_the_day_are_the_day(begin: int, end: int, minute: int) -> None:
    if begin == end:
        return

    def clock(at: int) -> str:
        return f"{at // 60:02}:{at % 60:02}"

    moment = datetime.datetime(2026, 3, 1, minute // 60, minute % 60)
    inside = Hours.model_validate(f"{clock(begin)}-{clock(end)}").has(moment)
    assert inside is not Hours.model_validate(f"{clock(end)}-{clock(begin)}").has(moment)


@given(st.text(max_size=40))
def test_no_text_becomes_an_option_of_ssh(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except BadInput:
        return
    for host in hosts:
        assert not host.address.startswith("-")
        assert not (host.user or "").startswith("-")
