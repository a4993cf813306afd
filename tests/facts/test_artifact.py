"""Artifacts survive the round trip, refuse what cannot be, and are written whole or not at all."""

from __future__ import annotations

import importlib
import json
import math
import os
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, ValidationError

from hetopt.core.artifact import Artifact, CleanText, PlainText, Record, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.paths import (
    MissingFile,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    shortened,
)
from hetopt.core.plain_text import MOST_CHARACTERS, escaped, fault_of, one_line
from tests.sources import modules


class Cake(Artifact):
    KIND: ClassVar[str] = "cake"
    VERSION: ClassVar[int] = 3
    MADE_BY: ClassVar[str] = "bake"

    name: str
    mass_kg: float


PLAIN = st.text().filter(lambda text: fault_of(text) is None)


@given(PLAIN, st.floats(allow_nan=False, allow_infinity=False))
def test_round_trip(name: str, mass_kg: float) -> None:
    cake = Cake(name=name, mass_kg=mass_kg)
    assert Cake.from_json(cake.to_json(), origin="cake.json") == cake


def test_every_truncation_is_one_sentence() -> None:
    text = Cake(name="carrot", mass_kg=1.5).to_json().rstrip()
    for end in range(len(text)):
        with pytest.raises(BadInput, match=r"^cake\.json .*\.$") as caught:
            Cake.from_json(text[:end], origin="cake.json")
        assert "bake" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 4}, "has cake schema 4; this hetopt reads up to 3"),
        ({"schema_version": 2}, "has cake schema 2, which this hetopt cannot read"),
        ({"schema_version": "new"}, "has cake schema 'new', which this hetopt cannot read"),
        ({"kind": "plan"}, "holds a plan, not a cake"),
        ({"kind": None}, "holds something else, not a cake"),
        ({"mass_kg": math.nan}, "mass_kg must be a finite number, got nan"),
        ({"mass_kg": "heavy"}, "mass_kg must be a valid number, got 'heavy'"),
        ({"colour": "red"}, "colour is no field of it"),
    ],
)
def test_edited_files_are_refused(change: dict[str, object], said: str) -> None:
    data = json.loads(Cake(name="carrot", mass_kg=1.5).to_json())
    with pytest.raises(BadInput) as caught:
        Cake.from_json(json.dumps(data | change), origin="cake.json")
    assert said in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(28, "No space left on device"), BadInput), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: type[BaseException]
) -> None:
    path = tmp_path / "cake.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    with pytest.raises(told, match=r"No space left on device|^$"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_in_a_private_folder_are_private_too(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        for mode, expected in ((0o700, 0o600), (0o755, 0o644)):
            tmp_path.chmod(mode)
            write_atomically(tmp_path / "cake.json", "new")
            assert (tmp_path / "cake.json").stat().st_mode & 0o777 == expected
    finally:
        os.umask(mask)


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


# Whatever lies where a file is expected: its content, or one sentence, in bounded time and memory.

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
        ("/dev/zero", "a device, a pipe or a socket, and no file"),
        ("pipe", "a device, a pipe or a socket, and no file"),
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


@given(st.text(max_size=1000))
def test_a_long_text_is_shortened_and_a_short_one_stays(text: str) -> None:
    assert shortened(text, 40) == text or len(shortened(text, 40)) <= 40 < len(text)


# Records hold single lines of printable characters, whoever wrote the file; what was told is cleaned instead.

HOSTILE = [
    "a\nb",
    "a\rb",
    "\x1b[31m",
    "\x9b31m",
    "\x00",
    "\x7f",
    "\u2028",
    "\u202e",
    "\ud800",
    "x" * (MOST_CHARACTERS + 1),
]


class Named(Record):
    """Text in every place where a record can have some."""

    name: str = ""
    names: tuple[str, ...] = ()
    told: CleanText = ""
    by_name: dict[str, float] | None = None
    nested: dict[str, tuple[str, ...]] | None = None
    anything: Any = None


@pytest.mark.parametrize("text", HOSTILE)
def test_a_record_refuses_what_is_no_plain_text_wherever_it_stands(text: str) -> None:
    for fields in (
        {"name": text},
        {"names": ("good", text)},
        {"by_name": {text: 1.0}},
        {"nested": {"a": ("good", text)}},
        {"nested": {text: ()}},
        {"anything": [{"a": text}]},
    ):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            Named.model_validate(fields)


@given(st.text())
def test_what_was_told_is_cleaned_and_never_refused(text: str) -> None:
    told = Named(told=text).told
    assert fault_of(told) is None
    assert one_line(told) == told


@given(st.text())
def test_plain_text_is_what_commands_nothing_and_can_be_written(text: str) -> None:
    if fault_of(text) is None:
        assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)
        assert text.splitlines() in ([], [text])
        assert Named(name=text).name.encode().decode() == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_that_was_escaped_in_json_says_the_same(text: str) -> None:
    written = json.dumps(text, ensure_ascii=False)
    assert json.loads(escaped(written)) == text
    assert fault_of(escaped(written)) is None


@pytest.mark.parametrize("text", ["g5.xlarge", "café", "中文", "👩‍👩‍👧", "می‌خواهم", "a b", "", "~/x y.py:task"])
def test_names_of_all_languages_stay_as_they_are(text: str) -> None:
    assert Named(name=text, told=text) == Named.model_construct(
        name=text, names=(), told=" ".join(text.split()), by_name=None, nested=None, anything=None
    )
    assert escaped(text) == text


def _every_record() -> Iterator[type[BaseModel]]:
    for module in modules():
        importlib.import_module(module)
    kinds = [BaseModel]
    while kinds:
        for kind in kinds.pop().__subclasses__():
            kinds.append(kind)
            if kind.__module__.startswith("hetopt."):
                yield kind


def test_every_record_of_the_house_refuses_hostile_text() -> None:
    assert not [kind.__name__ for kind in _every_record() if not issubclass(kind, PlainText)]
