"""Laws of runs that change what they exchange, read off what three processes left behind."""

from __future__ import annotations

import json

import pytest
import torch

from .scenarios import WORLD_SIZE, Crew

STEERED = ["auto", "auto-twice", "cheapest", "scan", "gravac", "accordion", "threshold", "warm_up"]


def test_nothing_is_lost_on_the_way_from_one_exchange_to_another(crew: Crew) -> None:
    """The model stands still, so what was sent in all must be the gradient as often as there were steps."""
    sent = [torch.load(crew.folder / f"switched-{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
    for other in sent[1:]:
        assert torch.equal(sent[0], other)
    dense = sent[0][0].double()
    total = sent[0].double().sum(0)
    assert (total - len(sent[0]) * dense).norm() <= 1e-5 * len(sent[0]) * dense.norm()
    torch.testing.assert_close(sent[0][-1].double(), dense, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(sent[0][3].double(), dense), "a thin exchange does not send everything"


def test_buckets_are_used_when_nothing_is_owed_and_nobody_looks(crew: Crew) -> None:
    told = json.loads((crew.folder / "switched-0.json").read_text())
    fused = [is_fused for _, _, is_fused, _ in told]
    in_buckets, whole = [False, True, False], [True] * 3
    assert fused == [*in_buckets, *whole, *whole, *in_buckets, *whole, *in_buckets, True, True, False]
    assert [looked for *_, looked in told] == [0, 2, 0] * 7
    for key, way, is_fused, _ in told:
        assert way == ("" if "buckets" in key and is_fused else key)


@pytest.mark.parametrize("name", [*STEERED, "dgc", "bf16", "qsgd_maxnorm"])
def test_replicas_stay_alike_through_all_changes(crew: Crew, name: str) -> None:
    replicas = [(crew.folder / name / f"fingerprints-{rank}").read_text().splitlines() for rank in range(WORLD_SIZE)]
    assert len(replicas[0]) > 3
    assert replicas[0] == replicas[1] == replicas[2]
    assert len(set(replicas[0])) > 3


@pytest.mark.parametrize("name", ["warm_up", "bf16", "qsgd_maxnorm"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(crew: Crew, name: str) -> None:
    whole, resumed = crew.finished(name), crew.finished(f"{name}-resumed")
    assert [event["resumed_step"] for event in crew.events(f"{name}-resumed", "run_started")] == [0, 23]
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.parametrize("name", ["accordion", "threshold", "auto-twice"])
def test_a_resumed_run_goes_on_exchanging_as_it_did(crew: Crew, name: str) -> None:
    name = name if name == "auto-twice" else f"{name}-resumed"
    events = crew.events(name)
    begins = [place for place, event in enumerate(events) if event["event"] == "run_started"]
    assert len(begins) == 2
    ways = ["", ""]
    for event in events[: begins[1]]:
        ways[0] = event["after"] if event["event"] == "exchange_changed" else ways[0]
        ways[0] = ways[0] or event.get("exchange", {}).get("way", "")
    ways[1] = next(event["exchange"]["way"] for event in events[begins[1] :] if "exchange" in event)
    changed = [event for event in events[begins[1] :] if event["event"] == "exchange_changed"]
    assert ways[1] == ways[0] or changed[0]["before"] == ways[0]


@pytest.mark.parametrize("name", STEERED)
def test_every_change_is_told_with_its_reason(crew: Crew, name: str) -> None:
    seen = [event["exchange"]["way"] for event in crew.events(name, "step") if "exchange" in event]
    for change in crew.events(name, "exchange_changed"):
        assert change["before"] != change["after"]
        assert change["reason"]
    changed_to = {change["after"] for change in crew.events(name, "exchange_changed")}
    first = seen[0]
    assert set(seen) <= {first} | changed_to


def test_policies_do_what_they_are_known_for(crew: Crew) -> None:
    def ratios(name: str) -> list[float]:
        return [event["exchange"]["ratio"] for event in crew.events(name, "step") if "exchange" in event]

    assert ratios("warm_up") == sorted(ratios("warm_up"), reverse=True)
    assert len(set(ratios("warm_up"))) > 2
    assert set(ratios("accordion")) <= {0.1, 0.01}
    assert set(ratios("threshold")) <= {1.0, 0.01}
    assert set(ratios("cheapest")) == {0.1}


def test_events_tell_what_was_sent(crew: Crew) -> None:
    for name in ("cheapest", "wide", "dgc", "bf16"):
        events = [event["exchange"] for event in crew.events(name, "step") if "exchange" in event]
        assert events
        for event in events:
            assert 0 < event["gain"] <= 1
            assert event["sent_bytes"] > 0
            assert event["sync_s"] > 0
        if name == "wide":
            assert {event["sent_bytes"] for event in events} == {events[0]["dense_bytes"]}
        else:
            assert all(event["sent_bytes"] < event["dense_bytes"] for event in events)
    network, *_ = crew.events("cheapest", "network_measured")  # a busy machine measures again
    assert network["bytes_per_s"] > 0
    assert {timing["collective"] for timing in network["timings"]} == {"all_reduce", "all_gather", "broadcast"}
    assert not crew.events("wide", "network_measured")


def test_the_momentum_is_kept_by_the_workers(crew: Crew) -> None:
    """The optimizer has none left, and training goes on all the same."""
    state = crew.state("dgc")
    assert [group["momentum"] for group in state["optimizer"]["param_groups"]] == [0.0]
    losses = [event["loss"] for event in crew.events("dgc", "step")]
    assert losses[-1] < 0.5 * losses[0]
