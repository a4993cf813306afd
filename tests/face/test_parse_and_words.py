"""What people type becomes SI numbers; numbers become what people read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.api.planning import metric_target
from hetopt.backends.options import slowdowns
from hetopt.cli import parse
from hetopt.cli.profile import epochs_asked
from hetopt.core import formatting, option
from hetopt.core.comm.compression_text import way_in_words
from hetopt.core.errors import BadInput


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("45m", 2700),
        ("45min", 2700),
        ("6h", 21600),
        ("1h30m", 5400),
        ("1.5 h", 5400),
        ("2d", 172800),
        (7, 7),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert option.duration_s(text, "deadline") == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1h", 0, "nan", "inf", "1h30", "h", "5x"])
def test_bad_durations(text: str | float) -> None:
    with pytest.raises(BadInput, match="`deadline` must be a length of time"):
        option.duration_s(text, "deadline")


@pytest.mark.parametrize("text", ["3", "0.5", " 12 "])
def test_what_is_typed_without_a_unit_is_asked_for_one(text: str) -> None:
    """A budget in dollars has one unit; three could be seconds, hours or days."""
    with pytest.raises(BadInput, match="`deadline` needs a unit"):
        option.duration_s(text, "deadline")


@pytest.mark.parametrize("text", ["", "1,,2", "1,x", "nan", "inf"])
def test_bad_slowdowns(text: str) -> None:
    with pytest.raises(BadInput, match="`slowdowns` must be"):
        slowdowns(text, "slowdowns")


@pytest.mark.parametrize("text", ["accuracy", "=1", "accuracy=", "accuracy=high", "accuracy=nan"])
def test_bad_targets(text: str) -> None:
    with pytest.raises(BadInput, match="`target`"):
        metric_target(text)


@given(st.floats(min_value=1e-6, max_value=1e7))
def test_a_printed_duration_is_within_one_percent(seconds: float) -> None:
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = formatting.duration(seconds).split()
    read = sum(float(number) * units[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))
    assert read == pytest.approx(seconds, rel=0.011, abs=6e-7)


@given(st.floats(min_value=0, max_value=1e7) | st.sampled_from((0.9996, 999.6e-6, 59.96, 3599.7, 172799.0)))
def test_a_printed_duration_is_of_its_own_unit(seconds: float) -> None:
    """Not 1,000 ms, 1e+03 ms or 60 s; and zero is zero seconds."""
    said = formatting.duration(seconds)
    assert "e+" not in said
    assert seconds or said == "0 s"
    full = {"µs": 1000, "ms": 1000, "s": 60, "min": 60, "h": 48}
    parts = said.split()
    assert all(float(number) < full.get(unit, math.inf) for number, unit in zip(parts[::2], parts[1::2], strict=True))


@given(st.floats(-1e9, 1e9), st.sampled_from(["worker", "batch", "epoch", "launch"]))
def test_one_is_one_and_everything_else_is_many(number: float, noun: str) -> None:
    amount, said = formatting.counted(number, noun).split(" ")
    assert (said == noun) == (amount == "1")
    assert float(amount.replace(",", "")) == pytest.approx(number, rel=0.051, abs=1e-300)


@given(st.floats(-1e-3, 1e-3))
def test_no_difference_is_minus_nothing(share: float) -> None:
    assert "-0.0 %" not in formatting.percent(share)


@pytest.mark.parametrize(
    ("script", "epochs"),
    [
        ("train.py --epochs 12", "12"),
        ("train.py --num_train_epochs=3 --lr 0.1", "3"),
        ("train.py --max-epochs 0", None),
        ("train.py --epochs", None),
        ("train.py", None),
    ],
)
def test_the_next_command_has_the_epochs_of_the_script(script: str, epochs: str | None) -> None:
    assert epochs_asked(script.split()) == epochs


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("identity by all_reduce", "uncompressed (all-reduce)"),
        ("topk 0.01 by all_gather", "topk 1 % (all-gather)"),
        ("topk 0.001 by ar_topk_star, packed in 4 buckets", "topk 0.1 % (ar-topk-star, packed in 4 buckets)"),
        ("bf16 by all_reduce in 4 buckets", "bf16 (all-reduce, in 4 buckets)"),
        ("every=8", "every=8"),
    ],
)
def test_ways_to_exchange_in_words(key: str, told: str) -> None:
    assert way_in_words(key) == told


@given(st.floats(min_value=1e-4, max_value=1e6))
def test_printed_dollars_are_within_a_few_percent(amount: float) -> None:
    assert float(formatting.usd(amount).replace("$", "").replace(",", "")) == pytest.approx(amount, rel=0.051)


@pytest.mark.parametrize(
    ("name", "ratio", "told"),
    [
        ("identity", 1.0, "none"),
        ("bf16", 1.0, "bf16"),
        ("topk", 0.5, "topk 50 % (2x)"),
        ("topk", 1 / 3, "topk 33.33 % (3x)"),
        ("dgc", 0.001, "dgc 0.1 % (1000x)"),
        ("dgc", 0.00025, "dgc 0.025 % (4000x)"),
    ],
)
def test_printed_compressions(name: str, ratio: float, told: str) -> None:
    assert formatting.compression(name, ratio) == told


@given(st.floats(1e-6, 1))
def test_a_printed_share_is_within_a_twentieth(part: float) -> None:
    assert float(formatting.share(part).removesuffix(" %")) / 100 == pytest.approx(part, rel=0.051)


def test_an_output_in_a_missing_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        parse.ready_to_write(tmp_path / "no" / "x.json", force=False)


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("old")
    with pytest.raises(BadInput, match="exists already") as caught:
        parse.ready_to_write(tmp_path / "x.json", force=False)
    assert "--force" in (caught.value.hint or "")
    parse.ready_to_write(tmp_path / "x.json", force=True)
