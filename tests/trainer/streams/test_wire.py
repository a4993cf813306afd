"""Samples arrive as they were sent, whatever they are made of; what is no sample is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.data.fetch import joined, rows_of
from hetopt.trainer.data.stream.wire import header_of, pack, read_header, unpack

_dtypes = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.int16]


@st.composite
def tensors(draw: st.DrawFn, samples: int) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (torch.randn(samples, *shape, generator=generator) * 50).to(draw(st.sampled_from(_dtypes)))


@st.composite
def batches(draw: st.DrawFn) -> object:
    samples = draw(st.integers(1, 6))
    leaf = tensors(samples)
    return draw(
        st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.lists(inner, min_size=1, max_size=3),
                st.lists(inner, min_size=1, max_size=3).map(tuple),
                st.dictionaries(st.sampled_from(["a", "b", "ä"]), inner, min_size=1),
            ),
            max_leaves=4,
        )
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    assert isinstance(one, list | tuple)
    assert isinstance(other, list | tuple)
    return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))


@given(batches())
def test_a_batch_survives_the_way(batch: object) -> None:
    text, data = pack(batch)  # type: ignore[arg-type]
    header = read_header(text)
    assert header.leaves == header_of(batch).leaves  # type: ignore[arg-type]
    assert {len(item) for item in data} == {header.sample_bytes}
    arrived = unpack(header, data)
    assert same(batch, arrived)
    split = [rows_of(arrived, 0, 1), rows_of(arrived, 1, len(data))] if len(data) > 1 else [arrived]
    assert same(joined(split), batch)


def test_what_arrived_can_be_written_to() -> None:
    text, data = pack(torch.ones(2, 3))
    arrived = unpack(read_header(text), data)
    assert isinstance(arrived, torch.Tensor)
    arrived += 1
    assert arrived.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    "batch", [torch.ones(2).to(torch.complex64), torch.tensor(1.0), ("text",), (torch.ones(2), torch.ones(3))]
)
def test_what_cannot_travel_is_refused(batch: object) -> None:
    with pytest.raises(BadInput):
        pack(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tree",
    [
        "{",
        "[]",
        "7",
        '"x"',
        "{}",
        '{"tuple": []}',
        '{"dtype": "object", "shape": []}',
        '{"dtype": "float32", "shape": [-1]}',
        '{"dtype": "float32", "shape": [999999999999]}',
        '{"dtype": "float32", "shape": 3}',
        '{"dict": [{"dtype": "float32", "shape": []}]}',
        '{"eval": [{"dtype": "float32", "shape": []}]}',
        json.dumps({"tuple": [{"dtype": "float32", "shape": [100_000, 100_000]}]}),
        '{"list":' * 60 + "1" + "}" * 60,
    ],
)
def test_headers_that_say_nothing_are_refused(tree: str) -> None:
    with pytest.raises(RunFailed, match="header that says nothing"):
        read_header(tree.encode())


def test_samples_of_another_length_are_refused() -> None:
    text, data = pack(torch.ones(2, 3))
    with pytest.raises(RunFailed, match=r"has 11 bytes; its header says 12 \(float32\[3\]\)"):
        unpack(read_header(text), [data[0], data[1][:-1]])
