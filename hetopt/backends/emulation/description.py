"""How people write down a rehearsed cluster and what happens to it, and how it is told back to them.

Hosts: ``speed=1,rate=100mbit x2; speed=0.25,rate=25mbit,workers=2``. Changes, one a line in a schedule:
``30s h2 speed=0.25 rate=10mbit``, ``step 500 * rate=10mbit``, ``step 40 h3 dies``, ``70s h3 returns``,
``50s h2 notice``, ``20s h1 cut``, ``25s h1 heals``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from hetopt.backends.emulation.namespaces import check_size
from hetopt.core.errors import BadInput
from hetopt.core.scaled_emulation import EVERY_HOST, Change, EmulatedHost

_HOSTS_EXAMPLE = "for example 'speed=1,rate=100mbit x2; speed=0.25,rate=25mbit'"
_CHANGE_EXAMPLE = "for example '30s h2 speed=0.25 rate=10mbit' or 'step 40 h3 dies'"
_FATES = ("dies", "returns", "notice", "cut", "heals")
_VALUE_EXAMPLE = "write speed=0.25 or rate=25mbit"
_RATE_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FASTEST = 1e12
_TIME_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class DescribedHost:
    """A host as it was written down. ``noise`` is the relative spread of its workers' declared times."""

    host: EmulatedHost
    noise: float = 0.0


def parse_hosts(text: str) -> tuple[DescribedHost, ...]:
    """The hosts of a description, called h0, h1 and so on.

    Raises:
        BadInput: it cannot be read, a value is impossible, or there are more hosts than addresses.
    """
    hosts: list[DescribedHost] = []
    for group in (part.strip() for part in text.split(";")):
        if not group:
            continue
        repeated = re.fullmatch(r"(.*\S)\s+x\s*(\d{1,9})", group, re.DOTALL)
        one, copies = (repeated[1], int(repeated[2])) if repeated else (group, 1)
        if copies == 0:
            raise BadInput(f"{group!r} asks for no host at all.", hint=_HOSTS_EXAMPLE)
        check_size(len(hosts) + copies)
        described = _described(one)
        hosts += [
            DescribedHost(host=described.host.model_copy(update={"name": f"h{len(hosts) + n}"}), noise=described.noise)
            for n in range(copies)
        ]
    if not hosts:
        raise BadInput("the description names no host.", hint=_HOSTS_EXAMPLE)
    return tuple(hosts)


def describe(host: EmulatedHost, noise: float = 0.0) -> str:
    """The host as `parse_hosts` reads it, to six digits; its name comes from its place."""
    words = [f"speed={host.speed:.6g}"]
    if host.rate_bits_per_s is not None:
        words.append(f"rate={format_rate(host.rate_bits_per_s)}")
    if host.cpu_cores is not None:
        words.append(f"cpu={host.cpu_cores:.6g}")
    if host.workers != 1:
        words.append(f"workers={host.workers}")
    if noise:
        words.append(f"noise={noise:.6g}")
    return ",".join(words)


def parse_changes(text: str, hosts: Collection[str]) -> tuple[Change, ...]:
    """The changes of a schedule, one a line; ``#`` begins a comment.

    Args:
        text: the schedule.
        hosts: names of the hosts there are.

    Raises:
        BadInput: a line cannot be read, has no moment, or names a host that there is not.
    """
    changes: list[Change] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} ({line.strip()!r})"
        change = _change(where, words, hosts)
        if change.at_s is None and change.at_step is None:
            raise BadInput(f"{where} does not say when.", hint=f"begin it with seconds or a step, {_CHANGE_EXAMPLE}")
        changes.append(change)
    return tuple(changes)


def parse_change(text: str, hosts: Collection[str]) -> Change:
    """One change, such as ``h2 speed=0.25``; without a moment it happens at once.

    Raises:
        BadInput: as for `parse_changes`.
    """
    return _change(repr(text.strip()), text.split(), hosts)


def describe_change(change: Change) -> str:
    """The change as `parse_change` reads it."""
    words = []
    if change.at_step is not None:
        words.append(f"step {change.at_step}")
    if change.at_s is not None:
        words.append(f"{change.at_s:.6g}s")
    words.append(change.host)
    if change.speed is not None:
        words.append(f"speed={change.speed:.6g}")
    if change.rate_bits_per_s is not None:
        words.append(f"rate={format_rate(change.rate_bits_per_s)}")
    words += [fate for fate in _FATES if getattr(change, fate)]
    return " ".join(words)


def parse_rate(text: str) -> float:
    """Bits a second, from ``25mbit``, ``1.5gbit``, ``100kbit`` or a plain number of bits a second.

    Raises:
        BadInput: it is none of these, or not more than zero.
    """
    written = text.strip()
    found = re.fullmatch(r"(.*?)([a-z]*)", written.lower(), re.DOTALL)
    if found is None or not found[1] or found[2] not in _RATE_UNITS:
        raise BadInput(f"{written!r} is no link rate.", hint="write it in bits a second, such as 25mbit or 1.5gbit")
    rate = _RATE_UNITS[found[2]] * _positive(found[1], f"the rate {written!r}")
    if rate > _FASTEST:
        raise BadInput(f"the rate {written!r} is more than any link carries.", hint="leave rate= out for no limit")
    return rate


def format_rate(bits_per_s: float) -> str:
    """The rate as `parse_rate` reads it, to six digits."""
    for unit in ("gbit", "mbit", "kbit"):
        if bits_per_s >= _RATE_UNITS[unit]:
            return f"{bits_per_s / _RATE_UNITS[unit]:.6g}{unit}"
    return f"{bits_per_s:.6g}bit"


def _change(where: str, words: list[str], hosts: Collection[str]) -> Change:
    at_s, at_step, words = _moment(where, words)
    if not words:
        raise BadInput(f"{where} names no host.", hint=_CHANGE_EXAMPLE)
    host, *said = words
    if host != EVERY_HOST and host not in hosts:
        raise BadInput(f"{where} names the host {host!r}; there is {_listed(hosts)}.", hint=_CHANGE_EXAMPLE)
    if not said:
        raise BadInput(f"{where} does not say what happens to {host}.", hint=_CHANGE_EXAMPLE)
    if len(said) == 1 and said[0] in _FATES:
        return Change(host=host, at_s=at_s, at_step=at_step, **{said[0]: True})
    values = _pairs(where, [part for word in said for part in word.split(",") if part])
    speed, rate = values.pop("speed", None), values.pop("rate", None)
    if values:
        raise BadInput(
            f"{where}: {next(iter(values))!r} cannot change.",
            hint="change speed= or rate=, or write 'dies', 'returns', 'notice', 'cut' or 'heals'",
        )
    return Change(
        host=host,
        at_s=at_s,
        at_step=at_step,
        speed=None if speed is None else _positive(speed, f"{where}: the speed"),
        rate_bits_per_s=None if rate is None else _rate(rate, where),
    )


def _moment(where: str, words: list[str]) -> tuple[float | None, int | None, list[str]]:
    """Seconds or step that a change begins with, if any, and the words behind it."""
    if words and words[0] == "step":
        if len(words) < 2 or not re.fullmatch(r"\d{1,15}", words[1]):
            raise BadInput(f"{where}: 'step' needs a whole number.", hint=_CHANGE_EXAMPLE)
        return None, int(words[1]), words[2:]
    if words and (found := re.fullmatch(r"(\d{1,15}(?:\.\d*)?)([smh])", words[0])):
        return float(found[1]) * _TIME_UNITS_S[found[2]], None, words[1:]
    if words and re.match(r"[-+.\d]", words[0]):
        raise BadInput(f"{where}: {words[0]!r} is no moment.", hint=_CHANGE_EXAMPLE)
    return None, None, words


def _described(text: str) -> DescribedHost:
    values = _pairs(repr(text), re.split(r"[,\s]+", text))
    speed, rate, cpu = (values.pop(key, None) for key in ("speed", "rate", "cpu"))
    workers, noise_text = values.pop("workers", "1"), values.pop("noise", "0")
    if values:
        raise BadInput(
            f"{text!r}: {next(iter(values))!r} is nothing that a host has.",
            hint="a host has speed=, rate=, cpu=, workers= and noise=",
        )
    if not re.fullmatch(r"0*[1-9]\d{0,3}", workers):
        raise BadInput(f"{text!r}: workers={workers} is no number of workers.", hint=_HOSTS_EXAMPLE)
    noise = _number(noise_text)
    if noise is None or not 0 <= noise < 1:
        raise BadInput(
            f"{text!r}: noise={noise_text} must be at least 0 and below 1.",
            hint="noise=0.05 lets a step's time spread by 5 %",
        )
    host = EmulatedHost(
        name="h0",
        workers=int(workers),
        speed=1.0 if speed is None else _positive(speed, f"{text!r}: the speed"),
        rate_bits_per_s=None if rate is None else _rate(rate, repr(text)),
        cpu_cores=None if cpu is None else _positive(cpu, f"{text!r}: the number of cores"),
    )
    return DescribedHost(host=host, noise=noise)


def _pairs(where: str, words: list[str]) -> dict[str, str]:
    """``key=value`` words."""
    values: dict[str, str] = {}
    for word in (word for word in words if word):
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise BadInput(f"{where}: {word!r} is not of the form key=value.", hint=_VALUE_EXAMPLE)
        if key in values:
            raise BadInput(f"{where} says {key}= twice.", hint="say it once")
        values[key] = value
    return values


def _rate(text: str, where: str) -> float:
    try:
        return parse_rate(text)
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}", hint=error.hint) from None


def _positive(text: str, what: str) -> float:
    value = _number(text)
    if value is None:
        raise BadInput(f"{what} is no number ({text!r}).", hint=_VALUE_EXAMPLE)
    if value <= 0:
        raise BadInput(f"{what} must be more than zero, not {text.strip()}.", hint=_VALUE_EXAMPLE)
    return value


def _number(text: str) -> float | None:
    """A finite number written in the ordinary way; None for anything else, 'inf' and '1_000' included."""
    if not re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", text, re.IGNORECASE):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def _listed(hosts: Collection[str]) -> str:
    names = list(hosts)
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"
