"""From answers of the AWS APIs to a catalogue folder: prices that count, types left out, and which folder is in use."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import BUNDLED
from hetopt.optimizer.market.catalog_choice import catalog_in_use
from hetopt.optimizer.market.catalog_folder import refreshed_folders, write_catalog

NOW = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


def test_the_bundled_catalogue_is_in_use_until_there_is_another(tmp_path: Path) -> None:
    today = datetime.date(2026, 11, 20)
    first = catalog_in_use("us-east-1", None, today=today, home=tmp_path)
    assert first.bundled
    assert "on demand 123 days old (2026-07-20), spot 111 days old (2026-08-01)" in first.ages
    assert "estimates of spot 510 days old (2025-06-28)" in first.ages
    assert str(first.note).startswith("Prices are 111 to 510 days old: `hetopt catalog refresh --region us-east-1`")
    files = {
        str(path.relative_to(BUNDLED)): path.read_text(encoding="utf-8")
        for path in BUNDLED.rglob("*")
        if path.is_file()
    }
    write_catalog(tmp_path, "us-east-1", "2026-11-18", files)
    before, newest = (write_catalog(tmp_path, "us-east-1", "2026-11-19", files) for _ in range(2))
    assert newest.name == "2026-11-19.1"
    assert refreshed_folders(tmp_path, "us-east-1") == (newest, before)
    second = catalog_in_use("us-east-1", None, today=today, home=tmp_path)
    assert not second.bundled
    assert second.catalog.directory == newest
    assert catalog_in_use("eu-west-2", None, today=today, home=tmp_path).bundled
    assert catalog_in_use("us-east-1", BUNDLED, today=today, home=tmp_path).bundled


def test_a_folder_that_is_no_catalogue_never_takes_the_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        write_catalog(tmp_path, "us-east-1", "2026-11-20", {"sources.json": "{}"})
    assert list((tmp_path / "us-east-1").iterdir()) == []
