"""The chart of a run: it fits every terminal, compares workers, leaves gaps, and marks what happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.cli import timeline_view
from hetopt.cli.timeline_view import BLOCKS
from hetopt.reports.timeline import Exchanged, Happening, Moment, Timeline


def moment(
    begin_s: float, end_s: float, shares: tuple[int, ...], step: int = 10, exchange: Exchanged | None = None
) -> Moment:
    times = tuple(0.001 * share for share in shares)
    waits = tuple(max(times) - time_s for time_s in times)
    return Moment(
        step=step,
        steps=10,
        begin_s=begin_s,
        end_s=end_s,
        local_batch_sizes=shares,
        compute_s=times,
        wait_s=waits,
        exchange=exchange,
    )


def exchanged(ratio: float, *, sent: float | None = None, gain: float = 1.0, sync_s: float = 0.01) -> Exchanged:
    sent_bytes = 1e6 * (ratio if sent is None else sent)
    return Exchanged(
        way="", ratio=ratio, gain=gain, sent_bytes=sent_bytes, dense_bytes=1e6, compress_s=0.0, sync_s=sync_s
    )


@given(
    st.lists(
        st.tuples(st.floats(0.01, 500), st.integers(1, 9999), st.integers(1, 9999), st.floats(1e-9, 1)),
        min_size=1,
        max_size=30,
    ),
    st.integers(60, 200),
    st.lists(st.floats(-1, 9000), max_size=15),
)
def test_no_line_is_wider_than_the_terminal(
    spans: list[tuple[float, int, int, float]], width: int, times_s: list[float]
) -> None:
    moments, now_s = [], 0.0
    for span_s, first, second, ratio in spans:
        moments.append(moment(now_s, now_s + span_s, (first, second), exchange=exchanged(ratio, gain=ratio**0.3)))
        now_s += span_s
    happenings = tuple(
        Happening(kind="condition_changed", time_s=time_s, step=1, hosts=("h1",), text="speed 0.5")
        for time_s in times_s
    )
    told = Timeline(moments=tuple(moments), happenings=happenings)
    assert all(len(line) <= width for line in timeline_view.draw(told, ["g5.xlarge-0", "h1"], width))


def test_workers_share_one_scale_from_zero() -> None:
    lines = timeline_view.draw(Timeline(moments=(moment(0, 10, (80, 40)),)), ["fast", "slow"], 80)
    assert lines[1].split()[1] == BLOCKS[7] * timeline_view.COLUMNS
    assert lines[2].split()[1] == BLOCKS[4] * timeline_view.COLUMNS
    assert lines[1].endswith(" 80")
    assert lines[2].endswith(" 40")


def test_time_without_steps_is_a_gap() -> None:
    told = Timeline(moments=(moment(0, 10, (8,)), moment(20, 30, (8,))))
    row = timeline_view.draw(told, ["h0"], 80)[1]
    third = timeline_view.COLUMNS // 3
    assert row[5 : 5 + 3 * third] == BLOCKS[7] * third + " " * third + BLOCKS[7] * third


def test_several_workers_of_a_host_are_told_apart() -> None:
    lines = timeline_view.draw(Timeline(moments=(moment(0, 1, (8, 8, 8)),)), ["h0", "h1", "h1"], 80)
    assert [line.split()[0] for line in lines[1:4]] == ["h0", "h1/0", "h1/1"]


def test_a_large_cluster_is_cut_and_says_so() -> None:
    lines = timeline_view.draw(Timeline(moments=(moment(0, 1, (8,) * 40),)), [f"h{n}" for n in range(40)], 80)
    assert len(lines) < 60
    assert lines[-1] == "24 more workers in the report's JSON form (--json)"


def test_marks_stand_where_things_happened_and_each_is_explained() -> None:
    happenings = (
        Happening(kind="shares_changed", time_s=0.0, step=5, text="now 4, 4 (start)"),
        Happening(kind="condition_changed", time_s=50.0, step=50, hosts=("h1",), text="speed 0.5"),
        Happening(kind="shares_changed", time_s=99.9, step=99, text="now 5, 3 (drift)"),
        Happening(kind="miniature_slowed", time_s=75.0, step=75, text="it does not fit"),
    )
    told = Timeline(moments=(moment(0, 100, (4, 4), step=100),), happenings=happenings)
    lines = timeline_view.draw(told, ["h0", "h1"], 100)
    marks = lines[-2][5:]
    assert [marks.index(mark) for mark in "s12"] == [0, 30, 45]
    assert marks[59] == "s"
    assert timeline_view.explain(told) == [
        ("1", "at 50 s (step 50): h1: speed 0.5"),
        ("2", "at 1 min 15 s (step 75): it does not fit"),
        ("s", "local batch sizes changed 2 times, last at 1 min 40 s (step 99): now 5, 3 (drift)"),
    ]


def test_the_exchange_is_drawn_where_something_was_compressed() -> None:
    thin, dense = exchanged(0.01, sent=0.02, gain=0.5), exchanged(1.0, sync_s=0.08)
    told = Timeline(moments=(moment(0, 30, (8, 8), exchange=thin), moment(30, 60, (8, 8), exchange=dense)))
    lines = timeline_view.draw(told, ["h0", "h1"], 100)
    start = lines.index(timeline_view.EXCHANGE_TITLE)
    drawn = {line.split()[0]: line.split(maxsplit=2) for line in lines[start + 1 : start + 5]}
    half = timeline_view.COLUMNS // 2
    assert drawn["ratio"][1:] == [BLOCKS[3] * half + BLOCKS[7] * half, "1 % – 100 %"]
    assert drawn["gain"][1:] == [BLOCKS[4] * half + BLOCKS[7] * half, "50 % – 100 %"]
    assert drawn["sent"][1:] == [BLOCKS[3] * half + BLOCKS[7] * half, "2 % – 100 %"]
    assert drawn["time"][1:] == [BLOCKS[1] * half + BLOCKS[7] * half, "10 ms – 80 ms"]


def test_rows_that_tell_nothing_are_left_out() -> None:
    def drawn(*exchanges: Exchanged | None) -> list[str]:
        moments = [moment(n, n + 1, (8, 8), exchange=one) for n, one in enumerate(exchanges)]
        lines = timeline_view.draw(Timeline(moments=tuple(moments)), ["h0", "h1"], 80)
        after = lines.index(timeline_view.EXCHANGE_TITLE) + 1 if timeline_view.EXCHANGE_TITLE in lines else len(lines)
        return [line.split()[0] for line in lines[after:-1]]

    assert drawn(None, None) == []
    assert drawn(exchanged(1.0), exchanged(1.0)) == []
    assert drawn(exchanged(1.0, sent=0.5), exchanged(1.0, sent=0.5)) == ["sent", "time"]
    assert drawn(None, exchanged(0.1, gain=0.7)) == ["ratio", "gain", "sent", "time"]


@given(st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_more_is_never_drawn_lower(one: float, other: float) -> None:
    small, large = sorted((one, other))
    told = Timeline(
        moments=(moment(0, 1, (8,), exchange=exchanged(small)), moment(1, 2, (8,), exchange=exchanged(large)))
    )
    rows = [line for line in timeline_view.draw(told, ["h0"], 80) if line.split()[0] in ("ratio", "sent")]
    for row in rows:
        bars = row.split()[1]
        assert BLOCKS.index(bars[0]) <= BLOCKS.index(bars[-1])


def test_changes_of_the_exchange_share_a_letter_and_the_last_reason_is_told() -> None:
    happenings = tuple(
        Happening(kind="exchange_changed", time_s=time_s, step=int(time_s), text=f"way {number} is cheaper")
        for number, time_s in enumerate((10.0, 50.0), start=1)
    )
    both = Happening(kind="shares_changed", time_s=50.0, step=50, text="now 5, 3")
    told = Timeline(moments=(moment(0, 100, (4, 4), step=100),), happenings=(*happenings, both))
    marks = timeline_view.draw(told, ["h0", "h1"], 100)[-2][5:]
    assert [place for place, mark in enumerate(marks) if mark == "x"] == [6, 30]
    assert timeline_view.explain(told) == [
        ("s", "local batch sizes changed at 50 s (step 50): now 5, 3"),
        ("x", "compression changed 2 times, last at 50 s (step 50): way 2 is cheaper"),
    ]


def test_more_happenings_than_digits() -> None:
    happenings = tuple(
        Happening(kind="condition_changed", time_s=float(n), step=n, hosts=("h0",), text=f"speed {n}")
        for n in range(1, 15)
    )
    told = Timeline(moments=(moment(0, 15, (4,)),), happenings=happenings)
    assert timeline_view.draw(told, ["h0"], 80)[-2].count(timeline_view.SEVERAL_MARK) == 5
    assert timeline_view.explain(told)[-1][0] == timeline_view.SEVERAL_MARK
    assert timeline_view.explain(told)[-1][1].startswith("and 5 more")


@pytest.mark.parametrize("width", [20, 40])
def test_a_very_narrow_terminal_still_gets_a_chart(width: int) -> None:
    assert len(timeline_view.draw(Timeline(moments=(moment(0, 10, (80, 40)),)), ["h0", "h1"], width)) > 8


def test_a_run_without_a_step_has_no_chart() -> None:
    assert timeline_view.draw(Timeline(), ["h0"], 80) == []
