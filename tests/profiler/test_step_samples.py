"""Step samples: what is read, what is refused and with which sentence, and what is remarked."""

from __future__ import annotations

import json
import math

import pytest

from hetopt.api.sample_remarks import remarks
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.core.step_samples import (
    MOST_SAMPLES,
    Node,
    StepSample,
    StepSamples,
    condense,
    parse_configuration,
    read_samples,
)
from hetopt.optimizer.market.catalog import load_catalog

TYPES = load_catalog("us-east-1", None).instance_types


def line(nodes: list[int] | None = None, **changes: object) -> str:
    layout = [{"type": "gpu", "workers": workers} for workers in (nodes or [1])]
    fields: dict[str, object] = {"nodes": layout, "local_batch_size": 32, "step_time_s": 0.2, "sync_time_s": 0.05}
    return json.dumps({**fields, **changes}) + "\n"


def sample(nodes: list[int] | None = None, **changes: object) -> StepSample:
    return StepSample.model_validate_json(line(nodes, **changes))


def test_fields_that_are_not_known_are_passed_over_and_empty_lines_too() -> None:
    read = read_samples([line(layout="assumed"), "\n", line([2, 1], local_batch_size=[8, 8, 4])], origin="f")
    assert [one.workers for one in read] == [1, 3]
    assert read[1].batch_sizes == (8, 8, 4)
    assert read[0].batch_sizes == (32,)


def test_a_layout_has_no_order() -> None:
    assert sample([2, 1]).layout == sample([1, 2]).layout != sample([1, 1, 1]).layout


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line(step_time_s=None), "step_time_s must be a valid number"),
        (line(step_time_s=0), "step_time_s must be greater than 0"),
        (line(step_time_s=-0.1), "step_time_s must be greater than 0"),
        (line(step_time_s=math.nan), "step_time_s must be a finite number"),
        (line(step_time_s=math.inf), "step_time_s must be a finite number"),
        (line(sync_time_s=1.0), "sync_time_s 1 is longer than step_time_s 0.2"),
        (line(local_batch_size=-64), "local_batch_size must be greater than 0 or a valid array, got -64"),
        (line(local_batch_size=0), "local_batch_size must be greater than 0"),
        (line(local_batch_size=[1, 2]), "local_batch_size has 2 entries for 1 workers"),
        (line(nodes=[]).replace('"workers": 1', '"workers": 0'), "nodes.0.workers must be greater than 0"),
        (line([60_000, 60_000]), "120000 workers are more than"),
        (line(compression={"name": "topk", "ratio": 2}), "compression.ratio must be less than or equal to 1"),
        ('{"nodes": [{"type": "gpu", "work', "the last, where the file stops: invalid JSON"),
        ("[1, 2]\n", "it must be an object"),
        (line(step_time_s=4.0e-9, sync_time_s=0), "in seconds, got 4e-09 s"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_in_one_sentence(bad: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_samples([line(), bad], origin="rows.jsonl")
    assert said in caught.value.message
    assert "rows.jsonl" in caught.value.message
    assert caught.value.hint


def test_missing_times_and_missing_rows_are_refused() -> None:
    fields = json.loads(line())
    del fields["step_time_s"]
    with pytest.raises(BadInput, match=r"line 1.*step_time_s is missing"):
        read_samples([json.dumps(fields)], origin="f")
    with pytest.raises(BadInput, match="holds no step samples"):
        read_samples(["\n"], origin="f")


@pytest.mark.parametrize("factor", [1000.0, 0.001])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_row_in_another_unit_is_found_by_what_its_neighbours_allow(factor: float, place: int) -> None:
    times = {8: 0.12, 16: 0.14, 32: 0.2, 64: 0.33, 128: 0.6, 256: 1.1}
    rows = [
        line(local_batch_size=size, step_time_s=t * (factor if index == place else 1), sync_time_s=None)
        for index, (size, t) in enumerate(times.items())
    ]
    with pytest.raises(BadInput, match="a unit that is off by 1000"):
        read_samples(rows, origin="f")


def test_a_queries_line_needs_no_times() -> None:
    asked = parse_configuration('{"nodes": [{"type": "gpu", "workers": 2}], "local_batch_size": 4}')
    assert (asked.workers, asked.compression) == (2, None)


def test_of_very_many_rows_repeats_go_first() -> None:
    repeated = [sample(step_time_s=0.2 + index / 1024) for index in range(9)] + [sample([2], step_time_s=0.5)]
    kept = condense(repeated, 5)
    assert [(one.workers, one.step_time_s) for one in kept] == [(1, 0.2 + 4 / 1024), (2, 0.5)]
    many = [sample(local_batch_size=size) for size in range(1, 40)]
    assert len(condense(many, 10)) == 10
    assert condense(many, 50) == many


def test_a_million_rows_are_condensed_while_they_are_read() -> None:
    text = [line(local_batch_size=size) for size in (8, 16, 32)]
    read = read_samples((text[index % 3] for index in range(2 * MOST_SAMPLES + 9)), origin="f")
    assert len(read) == 3 + 9


def test_samples_survive_being_written_and_read() -> None:
    imported = StepSamples(
        created="2026-01-01T00:00:00+00:00", hetopt_version="0", source="f", samples=(sample([2, 1]), sample())
    )
    assert StepSamples.from_json(imported.to_json(), origin="f") == imported
    with pytest.raises(BadInput, match="holds a step-samples, not a profile"):
        Profile.from_json(imported.to_json(), origin="f")


def test_what_samples_leave_open_is_said() -> None:
    def said(*rows: StepSample) -> str:
        return " ".join(remarks(rows, {**TYPES, "gpu": TYPES["g5.xlarge"]}))

    two_sizes = [sample(), sample(local_batch_size=64)]
    assert "local batch 32" in said(sample())
    assert "one worker" in said(*two_sizes)
    assert "one node" in said(*two_sizes, sample([2]))
    assert "three or more" in said(*two_sizes, sample([1, 1]))
    assert said(*two_sizes, sample([1, 1, 1])) == ""
    assert "2.5 times apart" in said(sample(), sample(step_time_s=0.5))
    assert "milliseconds" in said(sample(step_time_s=200.0))


def test_types_that_nothing_is_predicted_from_and_gpus_that_are_far_off_are_said() -> None:
    def of(type_: str, step_time_s: float) -> StepSample:
        return sample(nodes=[1]).model_copy(
            update={"nodes": (Node(type=type_, workers=1),), "step_time_s": step_time_s, "sync_time_s": None}
        )

    def said(*rows: StepSample) -> str:
        return " ".join(remarks(rows, TYPES))

    assert "X9000 is not in the catalogue" in said(of("X9000", 0.2))
    assert "foretells" not in said(of("g4dn.xlarge", 0.2), of("g5.xlarge", 0.12))
    throttled = said(of("g4dn.xlarge", 0.2), of("g5.xlarge", 2.0))
    assert "Steps on g5.xlarge are" in throttled
    assert "times longer than g4dn.xlarge foretells" in throttled
    assert "Steps on g4dn.xlarge are" in throttled
    three = said(of("g4dn.xlarge", 0.2), of("g5.xlarge", 2.0), of("g6.xlarge", 0.13))
    assert "Steps on g5.xlarge are" in three
    assert "Steps on g6.xlarge are" not in three


def test_a_lone_gpu_far_below_what_such_jobs_reach_is_said_and_one_that_waits_for_its_host_is_not() -> None:
    def said(step_time_s: float, batch: int = 64) -> str:
        known = {"model_kind": "convolution", "flops_per_sample": 12e9, "sync_time_s": None}
        one = sample(nodes=[1]).model_copy(
            update={
                **known,
                "nodes": (Node(type="g5.xlarge", workers=1),),
                "local_batch_size": batch,
                "step_time_s": step_time_s,
            }
        )
        return " ".join(remarks([one], TYPES))

    assert "of its GPU's peak rate" in said(6.0)
    assert "of its GPU's peak rate" not in said(0.2)
    assert "of its GPU's peak rate" not in said(0.2, batch=1)


def test_a_type_on_which_fewer_samples_took_longer_is_said() -> None:
    rows = [sample(local_batch_size=32, step_time_s=0.4), sample(local_batch_size=64, step_time_s=0.1)]
    assert "took 4.0 times longer for 32 samples than for 64" in " ".join(remarks(rows, TYPES))
    assert "longer for" not in " ".join(remarks(rows[::-1][:1], TYPES))
