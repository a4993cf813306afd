"""Whatever lies where a file is expected: its content, or one sentence, in bounded time and memory."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.paths import (
    MissingFile,
    decoded,
    lines_of,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    shortened,
)

READERS: list[Callable[[Path], object]] = [read_bytes, read_text, read_json]

PLAIN_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A file that may not be read; where the tests are root's, who may read everything, by somebody else."""
    (tmp_path / "file").write_text("{}")
    (tmp_path / "file").chmod(0)
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65_534)
    yield tmp_path / "file"
    os.seteuid(mine)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/dev/zero", "it is a device, not a file"),
        ("pipe", "it is a pipe, not a file"),
        ("socketless", "does not exist"),
        (".", "Is a directory"),
        ("x" * 300, "File name too long"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "cannot be the name of a file"),
        ("large", "larger than 64 MB"),
    ],
)
def test_what_is_no_file_is_one_sentence(
    reader: Callable[[Path], object], name: str, said: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(64_000_001)
    with pytest.raises(BadInput, match=said) as caught:
        reader(tmp_path / name)
    assert caught.value.hint
    assert len(caught.value.message) < 500
    assert isinstance(caught.value, MissingFile) == (name == "socketless")


@pytest.mark.parametrize("reader", READERS)
def test_what_belongs_to_someone_else_is_one_sentence(reader: Callable[[Path], object], closed: Path) -> None:
    with pytest.raises(BadInput, match="Permission denied"):
        reader(closed)


@pytest.mark.parametrize("reader", [read_text, read_json])
@pytest.mark.parametrize("content", [b"\xff\xfe", b'"\xc3"', b"\xed\xa0\x80"])
def test_what_is_no_utf8_is_one_sentence(reader: Callable[[Path], object], content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadInput, match="not UTF-8 text"):
        reader(tmp_path / "file")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read_json(tmp_path / "file") == {"a": 1}
    assert read_text(tmp_path / "file") == '{"a": 1}\n'
    assert parse_json('\ufeff{"a": 1}', origin="text") == {"a": 1}
    assert list(lines_of(io.StringIO("\ufeffa\nb"), origin="text")) == ["a\n", "b"]


@given(PLAIN_JSON)
def test_what_others_write_is_read_as_they_meant_it(value: object) -> None:
    assert parse_json(json.dumps(value), origin="text") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), origin="text") == value


@given(st.text() | st.binary())
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    said = "text is read."
    try:
        parse_json(text, origin="text")
    except BadInput as error:
        said = error.message
    assert said.startswith("text ")
    assert said.endswith(".")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ("9" * 5000, "holds an integer that is too large"),
        (f"-{2**70}", "holds an integer that is too large"),
        ('{"a": "\\ud800"}', "holds half of a surrogate pair"),
        ('{"\\uDfff": 1}', "holds half of a surrogate pair"),
        ('"\ud800"', "holds half of a surrogate pair"),
        ('{"a": 1', "is not complete JSON"),
        ('"a\nb"', "is not complete JSON"),
        ("", "is not complete JSON"),
    ],
)
def test_what_ends_parsers_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"^text {said}.*\\.$"):
        parse_json(text, origin="text")


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_json('"\\ud83d\\ude00"', origin="text") == "\U0001f600"


def test_a_line_without_end_is_refused_before_it_is_all_in_memory() -> None:
    class Endless(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            assert size is not None
            assert 0 < size < 10_000_000
            return "x" * size

    with pytest.raises(BadInput, match="line 1 is longer than"):
        next(lines_of(Endless(), origin="text"))


@given(st.text(max_size=1000))
def test_a_long_text_is_shortened_and_a_short_one_stays(text: str) -> None:
    assert shortened(text, 40) == text or len(shortened(text, 40)) <= 40 < len(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_with_newlines_alone(text: str) -> None:
    assert decoded(text.encode(), origin="text").splitlines() == text.removeprefix("\ufeff").splitlines()
