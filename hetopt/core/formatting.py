"""Numbers as text for people: durations, money, counts, shares, and the settings of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.core.memory import Precision
    from hetopt.core.run_spec import Compression, Synchronization

Say = Callable[[float], str]
"""A formatter of a number in SI units or dollars as text for people."""


def duration(seconds: float) -> str:
    """Format seconds for people: '0.8 ms', '3.2 s', '4 min 10 s', '2 h 05 min', '3 d 4 h'.

    Args:
        seconds: not negative.
    """
    if seconds == 0:
        return "0 s"
    # The unit is that of the rounded number: 999.7 µs are 1 ms, and not 1,000 µs.
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} µs" if seconds >= 0.95e-6 else f"{seconds * 1e6:.1g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        hours, rest = divmod(minutes, 60)
        return f"{hours} h {rest:02d} min" if rest else f"{hours} h"
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days} d {rest} h" if rest else f"{days} d"


def with_startup(total_s: float, startup_s: float) -> str:
    """Format a run's whole duration and the start-up contained in it: '31.2 s with 27 s of start-up'."""
    return f"{duration(total_s)} with {duration(startup_s)} of start-up"


def difference(seconds: float) -> str:
    """Format a signed difference of durations in seconds: '4.4 s more', '2 min 33 s less'."""
    return f"{duration(abs(seconds))} {'less' if seconds < 0 else 'more'}"


def duration_span(value_s: float, low_s: float, high_s: float) -> str:
    """Format the interval from ``low_s`` to ``high_s`` around a duration, in the unit of ``value_s``: '1.2–4.0 h'."""
    size, name = next(((size, name) for least, size, name in _UNITS if value_s >= least), (1e-3, "ms"))
    return f"{_short(low_s / size)}–{_short(high_s / size)} {name}"


_UNITS = ((48 * 3600, 24 * 3600, "d"), (3600, 3600, "h"), (60, 60, "min"), (1, 1, "s"))
"""From which duration on a unit is used, its seconds, and its name."""


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 9.95 or number == 0 else f"{number:.1f}"


def usd(amount: float) -> str:
    """Format US dollars, not negative, by digits that matter: '$0.000042', '$0.0042', '$0.310', '$12.40', '$1,204'."""
    if amount >= 999.995:
        return f"${amount:,.0f}"
    if amount >= 0.995:
        return f"${amount:.2f}"
    if amount >= 0.1:
        return f"${amount:.3f}"
    if amount >= 1e-4 or amount == 0:
        return f"${amount:.2g}"
    # Two digits that count, without an exponent, which nobody reads as money.
    return f"${amount:.{1 - math.floor(math.log10(amount))}f}" if amount >= 1e-6 else "<$0.000001"


def round_up_usd(amount: float) -> float:
    """Round US dollars up to the next amount that `usd` can write, so that the shown budget is enough; 0 below 0."""
    if amount <= 0:
        return 0.0
    digits = (
        0 if amount >= 1000 else 2 if amount >= 0.995 else 3 if amount >= 0.1 else 1 - math.floor(math.log10(amount))
    )
    unit = float(10**digits)
    return math.ceil(amount * unit - 1e-9) / unit


def round_up_s(seconds: float) -> float:
    """Round seconds up to the next time that `duration` can write, so that the shown deadline is enough."""
    unit = 0.1 if seconds < 10 else 1.0 if seconds < 3600 else 60.0 if seconds < 48 * 3600 else 3600.0
    return math.ceil(seconds / unit - 1e-9) * unit


def percent(share: float) -> str:
    """Format a relative difference, 0.032, as signed percent: '+3.2 %'."""
    return f"{share * 100:+.1f} %".replace("-0.0 %", "+0.0 %")


_ENDINGS = {
    "target": ", its target reached",
    "epochs": ", all its epochs done",
    "steps": ", all its steps done",
    "stopped": "",
    "script": ", its script done",
}


def ending(reason: str | None) -> str:
    """Format why a run ended as a phrase behind its state: ', all its epochs done'; empty: None or ``stopped``."""
    return _ENDINGS.get(reason, f", ended by {reason}") if reason else ""


def reached(metrics: Mapping[str, float], loss: float | None) -> str:
    """Format the last evaluation's metrics ('accuracy 0.93'), else the training loss; empty: neither is known."""
    if not metrics and loss is not None:
        return f"training loss {loss:.4g}"
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def count(number: float) -> str:
    """Format a number with commas at thousands: '1,437', '12.5'; with two digits below 1: '0.25'."""
    if abs(number) >= 99.95 or float(number).is_integer():
        return f"{number:,.0f}"
    return f"{number:.1f}".removesuffix(".0") if abs(number) >= 0.95 else f"{number:.2g}"


def counted(number: float, noun: str) -> str:
    """Format a number with its noun, singular or plural: '1 worker', '1,437 steps', '3 batches'."""
    text = count(number)
    if text == "1":
        return f"1 {noun}"
    return f"{text} {noun}{'es' if noun.endswith(('tch', 'nch', 's', 'x')) else 's'}"


def compression(name: str, ratio: float) -> str:
    """Format a compressor and the fraction of elements it sends: 'none', 'topk 1 % (100x)', 'bf16'."""
    if name == "identity":
        return "none"
    if ratio >= 1:
        return name
    factor = 1 / ratio
    return f"{name} {ratio * 100:.4g} % ({f'{factor:.0f}' if factor >= 100 else f'{factor:.3g}'}x)"


def exchange(way: Compression, sync: Synchronization) -> str:
    """Format how workers synchronize: 'topk 1 % (100x)' for gradients, 'local-sgd(8)' where parameters are averaged."""
    if not sync.is_local:
        return compression(way.name, way.ratio) + ("" if way.rank is None else f" rank {way.rank}")
    from hetopt.core.run_spec import spell_sync  # which brings pydantic

    return spell_sync(sync) if way.name == "identity" else f"{spell_sync(sync)}, averages in {way.name}"


def method(way: Compression, sync: Synchronization, precision: Precision) -> str:
    """Format the compression, synchronization and precision of a plan: 'none', 'topk 1 % (100x), in bf16'."""
    return exchange(way, sync) + ("" if precision == "fp32" else f", in {precision}")


def share(part: float) -> str:
    """Format a fraction of a whole as percent with as many digits as matter: '100 %', '3.1 %', '0.02 %'."""
    if 0 < part < 1e-6:
        return "<0.0001 %"
    return f"{part * 100:.2g} %" if part < 0.0995 else f"{part * 100:.0f} %"


def distance(relative: float) -> str:
    """Format the relative distance of two gradients: '12 %', or '2e-7' where it is only rounding."""
    if not math.isfinite(relative):
        return "a gradient that is not finite"
    return f"{100 * relative:.2g} %" if relative >= _ROUNDING else f"{relative:.0e}".replace("e-0", "e-")


_ROUNDING = 1e-4
"""Relative distance of two float32 gradients from which on it is no longer their rounding."""


def chance(probability: float) -> str:
    """Format a probability as whole percent, rounded down: 0.899 is '89 %'."""
    return f"{math.floor(probability * 100 + 1e-9)} %"


def cluster(machines: Iterable[tuple[int, str]]) -> str:
    """Format a cluster from pairs of count and machine type: '2 × c7i.large + 1 × g5.xlarge'; empty of no pairs."""
    return " + ".join(f"{number} × {name}" for number, name in machines)


def listed(names: Sequence[str]) -> str:
    """Format names as a list: 'a, b and c'; of more than three, 'a, b and 6 others'; of none, an empty text."""
    if len(names) <= 3:
        return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"{', '.join(names[:2])} and {len(names) - 2} others"


def bit_rate(bits_per_s: float) -> str:
    """Format a rate in bits a second: '25 Mbit/s', '1.6 Gbit/s'."""
    return _in_unit(bits_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"))


def bytes_(number: float) -> str:
    """Format a number of bytes in decimal units: '393 kB', '12.4 GB'."""
    return _in_unit(number, ("B", "kB", "MB", "GB", "TB"))


def _in_unit(number: float, units: Sequence[str]) -> str:
    """Format three digits in the first unit, each a thousand of the one before, that needs no more."""
    while number >= 999.5 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}"
