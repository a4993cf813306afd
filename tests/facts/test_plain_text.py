"""Records hold single lines of printable characters, whoever wrote the file; what was told is cleaned instead."""

from __future__ import annotations

import importlib
import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hetopt.core.artifact import PlainText, Record, Told
from hetopt.core.plain_text import MOST_CHARACTERS, escaped, fault_of, one_line
from tests.sources import modules

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
    told: Told = ""
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
