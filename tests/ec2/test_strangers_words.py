"""Small messages between renter and machines, damaged in every way: read as they were meant, or as nothing at all."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2.protocol import Latest, Lease, Placements, is_over, placement_of
from hetopt.backends.ec2.renter.edge import read_ledger

SPEC = {
    "task": "digits",
    "workers": [{"host": "a-0", "type": "local", "local_batch_size": 1}],
    "stop": {"max_steps": 1},
}
PLACEMENT = {
    "generation": 1,
    "meeting": "10.0.0.1",
    "resume_from": "step-3",
    "pauses": False,
    "hosts": {"i-1": {"host": "a-0", "address": "10.0.0.1"}},
    "spec": SPEC,
}
LEASE = {"end_s": 1.0, "stop_training_s": 1.0}
WRONG = [None, True, -1, 1e400, 10**400, "", "x", "\ud800", "a\nb", "../../x", [], {}, [[]], {"a": {}}, "9" * 5000]


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> bytes:
    value = json.loads(json.dumps(good))
    inner = value
    while isinstance(inner, dict) and inner:
        key = draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[key], dict) or draw(st.booleans()):
            if draw(st.booleans()):
                inner[key] = draw(st.sampled_from(WRONG))
            else:
                del inner[key]
            break
        inner = inner[key]
    text = json.dumps(value)
    cut = draw(st.sampled_from([None, None, len(text) // 2]))
    return (text[:cut] + draw(st.sampled_from(["", "", "\x00", "[" * 50_000, "]"]))).encode("utf-8", "surrogatepass")


@given(damaged(PLACEMENT))
def test_a_placement_is_one_or_none(data: bytes) -> None:
    found = placement_of(data, "i-1")
    assert found is None or (found.node.host and isinstance(found.node.address, str))
    together = Placements.of_json(data)
    assert together is None or together.hosts


@given(damaged(LEASE) | st.binary())
def test_a_lease_is_finite_or_none(data: bytes) -> None:
    lease = Lease.of_json(data)
    assert lease is None or abs(lease.end_s) + abs(lease.stop_training_s) < float("inf")


@given(damaged({"generation": 1}) | st.binary())
def test_an_outcome_and_a_checkpoint_are_told_or_not(data: bytes) -> None:
    assert is_over(data, 0) in (True, False)
    assert Latest.of(data) is None or Latest.of(data)


def test_a_ledger_passes_over_what_it_did_not_write(tmp_path: Any) -> None:
    lines = ["[" * 100_000, "9" * 5000, '{"ids": 5}', '"\\ud800"', "null"]
    (tmp_path / "ledger").write_text("\n".join(lines))
    assert read_ledger(tmp_path / "ledger") == []
