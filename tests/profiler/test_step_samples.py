"""Step samples: what is read, what is refused and with which sentence, and what is remarked."""

from __future__ import annotations

import json
import math

import pytest

from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.core.step_samples import (
    MOST_SAMPLES,
    StepSample,
    StepSamples,
    condense,
    read_samples,
)


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
        (line(step_time_s=4.0e-9, sync_time_s=0), "in seconds, got 4e-09"),
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
