"""`hetopt catalog refresh` without an account: against a server of AWS's public feeds, and what stands in its place.

From answers of the AWS APIs to a catalogue folder: prices that count, types left out, and which folder is in use.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetopt.api import catalog_refreshing
from hetopt.api.catalog_refreshing import OwnCatalog
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.core.interruption import Reporter
from hetopt.optimizer.market import public_file
from hetopt.optimizer.market.catalog import BUNDLED, load_catalog
from hetopt.optimizer.market.catalog_folder import (
    KEPT,
    age_note,
    catalogs_home,
    in_use,
    price_days,
    refreshed_folders,
    write_catalog,
)
from tests.catalog.price_server import (
    REGION,
    TYPES,
    Feeds,
    price_list,
    reserved,
    row,
    rows_of,
    serving,
    usd_of,
)
from tests.disturbance import PATIENCE_S

FEW = tuple(name for name in TYPES if name.startswith(("g", "p", "c7i.")))
INDEX = "/offers/v1.0/aws/AmazonEC2/current/region_index.json"


@pytest.fixture
def feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Feeds]:
    with serving() as feeds:
        monkeypatch.setenv("HETOPT_PRICE_MIRROR", feeds.url)
        monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
        monkeypatch.setattr(public_file.time, "sleep", lambda seconds: None)
        feeds.fill(names=FEW)
        yield feeds


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def refresh(feeds: Feeds, said: list[str]) -> Callable[..., OwnCatalog]:
    def once(region: str = REGION) -> OwnCatalog:
        (own,) = catalog_refreshing.refresh(region, reporter=Reporter(note=said.append))
        return own

    return once


def test_prices_are_those_of_today_with_date_and_source(refresh: Callable[..., OwnCatalog]) -> None:
    own = refresh()
    today = datetime.datetime.now(datetime.UTC).date()
    catalog = load_catalog(REGION, own.folder)
    listing = catalog.listing("g5.xlarge")
    assert listing.on_demand is not None
    assert listing.spot is not None
    assert listing.band is not None
    assert (listing.on_demand.usd_per_hour, listing.on_demand.date) == (pytest.approx(usd_of("g5.xlarge")), today)
    assert "price list of 2026-11-25" in listing.on_demand.source
    assert listing.spot.usd_per_hour == pytest.approx(usd_of("g5.xlarge") / 3, abs=1e-4)
    assert listing.spot.is_estimate is False
    # The feeds of all regions say themselves when they changed last.
    assert listing.spot.date == listing.band.date == datetime.date(2026, 11, 19)
    assert listing.band.label == "5-10%"
    assert own.contents.on_demand == own.contents.spot == len(FEW)
    # What was not asked for stays as it was bundled.
    assert catalog.instance_type("g5.xlarge") == load_catalog().instance_type("g5.xlarge")
    assert catalog.in_region("us-east-1").listings.keys() == load_catalog().listings.keys()
    assert in_use(REGION).directory == own.folder


def test_the_newest_catalogues_are_kept(refresh: Callable[..., OwnCatalog], feeds: Feeds) -> None:
    first, second = refresh(), refresh()
    assert second.contents.files == first.contents.files
    feeds.fill(names=FEW, factor=2)
    third = refresh()
    price = load_catalog(REGION, third.folder).price("g5.xlarge", "on-demand")
    assert price is not None
    assert price.usd_per_hour == pytest.approx(usd_of("g5.xlarge", 2))
    assert refreshed_folders(third.folder.parents[1], REGION) == (third.folder, second.folder)
    assert KEPT == 2


@pytest.mark.parametrize("packs", [False, True])
def test_a_file_whose_connection_breaks_is_read_again(
    packs: bool, refresh: Callable[..., OwnCatalog], feeds: Feeds
) -> None:
    whole = refresh().contents.files
    feeds.packs = packs
    feeds.fill(names=FEW, version="20261126000000")
    feeds.asked.clear()
    feeds.cuts = [1_000, 5_000]
    assert refresh().contents.files == whole
    assert [status for path, _, status in feeds.asked if path.endswith(".csv")] == [200, 200, 200]
    feeds.fill(names=FEW, version="20261127000000")
    feeds.cuts = [0] * public_file.TRIES
    with pytest.raises(CloudRefused, match="ended in the middle"):
        refresh()


def broken(feeds: Feeds, content: bytes) -> None:
    feeds.files[feeds.list_path] = content


def page(feeds: Feeds, path: str, kind: str) -> None:
    body = b"<!DOCTYPE html><html><title>Sign in to the guest network</title></html>"
    feeds.answers[path] = (200, {"Content-Type": kind}, body)


BAD: dict[str, tuple[Callable[[Feeds], None], type[HetoptError], str]] = {
    "cut off in a row": (lambda f: broken(f, price_list(rows_of(FEW))[:-30]), BadInput, "cut off"),
    "cut off after a row": (
        lambda f: broken(f, price_list(rows_of(FEW[:5]))),
        BadInput,
        "lacks .* of the .* types that had a price",
    ),
    "in CNY": (lambda f: broken(f, price_list(iter([row("g5.xlarge", 9, Currency="CNY")]))), BadInput, "in USD"),
    "all zero": (lambda f: broken(f, price_list(iter([row("g5.xlarge", 0.0)]))), BadInput, "no on-demand price"),
    "empty": (lambda f: broken(f, b""), BadInput, "is no price list"),
    "a login page": (lambda f: page(f, f.list_path, "text/html; charset=utf-8"), BadInput, "login page"),
    "a page that calls itself a table": (lambda f: page(f, f.list_path, "text/csv"), BadInput, "login page"),
    "a login page for the index": (lambda f: page(f, INDEX, "application/json"), BadInput, "login page"),
    "a redirect to another host": (
        lambda f: f.answers.update({f.list_path: (302, {"Location": "https://elsewhere.example/x"}, b"")}),
        CloudRefused,
        "302",
    ),
    "a redirect to a file": (
        lambda f: f.answers.update({f.list_path: (302, {"Location": "file:///etc/passwd"}, b"")}),
        CloudRefused,
        "302",
    ),
    "redirects in a circle": (
        lambda f: f.answers.update({f.list_path: (302, {"Location": f.list_path}, b"")}),
        CloudRefused,
        "302",
    ),
    "not there": (lambda f: f.files.pop(f.list_path) and None, CloudRefused, "404"),
    "busy": (lambda f: f.answers.update({INDEX: (503, {}, b"")}), CloudRefused, "503"),
    "packed strangely": (
        lambda f: f.answers.update({f.list_path: (200, {"Content-Encoding": "br"}, b"something")}),
        BadInput,
        "unpacked",
    ),
    "packed badly": (
        lambda f: f.answers.update({f.list_path: (200, {"Content-Encoding": "gzip"}, b"nothing packed")}),
        BadInput,
        "unpacked",
    ),
}


def test_what_is_no_price_list_is_a_sentence_and_changes_nothing(
    refresh: Callable[..., OwnCatalog], feeds: Feeds, said: list[str]
) -> None:
    before = refresh()
    for number, (case, (spoil, error, says)) in enumerate(BAD.items()):
        said.clear()
        feeds.files.clear()
        feeds.answers.clear()
        feeds.fill(names=FEW, factor=3, version=f"2026112600{number:04}")
        spoil(feeds)
        with pytest.raises(error, match=says) as refused:
            refresh()
        assert refused.value.hint, case
        assert said == [], case
    assert refreshed_folders(before.folder.parents[1], REGION) == (before.folder,)
    feeds.answers.clear()  # what was spoiled is no beginning of the next try
    feeds.fill(names=FEW, factor=3, version=f"2026112600{number:04}")
    price = load_catalog(REGION, refresh().folder).price("g5.xlarge", "on-demand")
    assert price is not None
    assert price.usd_per_hour == pytest.approx(usd_of("g5.xlarge", 3))


def test_a_packed_file_that_grows_without_end_is_refused(
    refresh: Callable[..., OwnCatalog], feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_file, "PIECE_BYTES", 1 << 14)
    feeds.packs = True
    feeds.files[feeds.list_path] = b"\n" * 30_000_000
    with pytest.raises(BadInput, match="larger than"):
        refresh()


def test_spot_prices_that_cannot_be_had_stay_as_they_were(
    refresh: Callable[..., OwnCatalog], feeds: Feeds, said: list[str]
) -> None:
    del feeds.files["/spot.json"]
    feeds.files["/spot-advisor-data.json"] = b"{}"
    bundled, first = load_catalog(REGION), load_catalog(REGION, refresh().folder)
    assert len(said) == 2
    assert all("the bundled catalogue's stay, because" in sentence for sentence in said)
    for name in FEW:
        old, new = bundled.listing(name), first.listing(name)
        assert new.on_demand is not None
        assert new.band == old.band
        if old.spot is not None and not old.spot.is_estimate:
            assert new.spot == old.spot


@pytest.mark.parametrize(("region", "says"), [("eu-wset-1", "eu-west-1"), ("cn-north-1", "CNY"), ("../../x", "region")])
def test_a_region_that_is_not_there_is_refused(region: str, says: str, refresh: Callable[..., OwnCatalog]) -> None:
    with pytest.raises(BadInput, match=says):
        refresh(region)


def test_all_regions_are_read_one_after_another_and_each_is_in_use_when_it_is_whole(
    refresh: Callable[..., OwnCatalog], feeds: Feeds
) -> None:
    feeds.fill(names=FEW, regions=("eu-west-1", "eu-west-2", "xx-none-1"))
    own = catalog_refreshing.refresh("all", reporter=Reporter())
    assert [one.region for one in own] == ["eu-west-1", "eu-west-2"]
    assert len([path for path, _, _ in feeds.asked if path == "/spot.json"]) == 1


def test_one_refresh_at_a_time(refresh: Callable[..., OwnCatalog], tmp_path: Path) -> None:
    with catalog_refreshing._alone(tmp_path / "catalogs" / "aws"), pytest.raises(BadInput, match="another refresh"):
        refresh()
    refresh()


# Says at its end what memory it had at most (`ru_maxrss` counts what it was forked from, too) and how often it changed
# or opened something below its home; ends at once before it does so for the time that the environment names.
PROGRAM = """
import atexit, os, re, signal, sys
from hetopt.cli.main import main
seen = 0
def hook(event, arguments):
    global seen
    ours = event in ("open", "os.rename", "os.mkdir", "os.truncate") and os.environ["HETOPT_HOME"] in str(arguments[0])
    if ours or event in ("os.remove", "os.rmdir"):
        seen += 1
        if seen == int(os.environ["ENDS_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
def end():
    print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1], seen, file=sys.stderr)
sys.addaudithook(hook)
atexit.register(end)
main()
"""


def command(feeds: Feeds, home: Path, *arguments: str, ends_at: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "catalog", "refresh", "--region", REGION, *arguments],
        env={**os.environ, "HETOPT_PRICE_MIRROR": feeds.url, "HETOPT_HOME": str(home), "ENDS_AT": str(ends_at)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True, kw_only=True)
class Done:
    """A refresh that ended by itself: what it said, its processor time, its memory at most, its changes of files."""

    told: dict[str, Any]
    cpu_s: float
    memory_mb: float
    changes: int


def measured(feeds: Feeds, home: Path) -> Done:
    with command(feeds, home, "--json") as process:
        told, noted = process.stdout.read(), process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, noted
    memory, changes = noted.split()[-2:]
    return Done(
        told=json.loads(told),
        cpu_s=used.ru_utime + used.ru_stime,
        memory_mb=int(memory) / 1024,
        changes=int(changes),
    )


def big(folder: Path, feeds: Feeds, size: int, factor: float = 1.0) -> None:
    """A price list of about so many bytes, on the disk."""
    content = price_list(rows_of(FEW, factor))
    padding = reserved(4_000_000)
    path = folder / f"list-{factor}.csv"
    with path.open("wb") as stream:
        stream.write(content)
        while stream.tell() < size:
            stream.write(padding)
    feeds.fill(names=FEW, factor=factor)
    feeds.files[feeds.list_path] = path


def test_a_refresh_takes_little_memory(feeds: Feeds, tmp_path: Path) -> None:
    big(tmp_path, feeds, 5_000_000)
    done = measured(feeds, tmp_path)
    assert done.told["on_demand_prices"] == len(FEW)
    assert done.memory_mb < 100


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_after_a_kill_the_old_catalogue_is_there_or_the_new_one(kills: int, feeds: Feeds, tmp_path: Path) -> None:
    """Killed while it reads, and at random changes of files, between catalogues of a day that differ in all figures."""
    draw = random.Random(20261126)
    factors = [1.0]
    for _ in range(2):  # with the second one, an older catalogue goes
        factors.append(2 * factors[-1])
        big(tmp_path, feeds, 3_000_000, factors[-1])
        changes = measured(feeds, tmp_path).changes
    old = factors[-1]
    found = []
    for kill in range(kills):
        new = 2 * old if old < 16 else 1.0
        big(tmp_path, feeds, 3_000_000, new)
        reading = kill % 3 == 0
        # Just before the end the old catalogues go: that is looked at each time.
        ends_at = 0 if reading else changes - draw.randrange(12) if kill % 3 == 1 else draw.randint(1, changes)
        feeds.bytes_per_s, feeds.sent = (1_000_000 if reading else None), 0
        with command(feeds, tmp_path, ends_at=ends_at) as process:
            stop = draw.randrange(3_000_000)
            while (
                reading and feeds.sent < stop and process.poll() is None
            ):  # it may go on with what an earlier one left
                time.sleep(0.01)
            if reading:
                process.kill()
            process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL or (reading and process.returncode == 0)
        catalog = in_use(REGION)
        prices = [(name, catalog.price(name, market)) for name in FEW for market in ("spot", "on-demand")]
        ratios = {
            round(price.usd_per_hour / usd_of(name) * (3 if price.market == "spot" else 1), 1)
            for name, price in prices
            if price is not None and usd_of(name) > 0.3
        }
        assert ratios in ({old}, {new}), (kill, ends_at)
        found.append((ends_at, "new" if ratios == {new} else "old"))
        old = ratios.pop()
    print(changes, found)
    feeds.bytes_per_s = None
    measured(feeds, tmp_path)
    folders = refreshed_folders(tmp_path / "catalogs" / "aws", REGION)
    assert len(folders) <= KEPT
    assert sorted(path.name for path in folders[0].parent.iterdir()) == sorted(path.name for path in folders)


def test_the_bundled_catalogue_is_in_use_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    first, today = in_use(), datetime.date(2026, 11, 20)
    assert first.directory == BUNDLED
    assert price_days([first]) == "the oldest of 2025-06-28"
    days = [datetime.date(2026, 8, 1), datetime.date(2025, 6, 28)]
    told = "Prices are 111 to 510 days old; today's: `hetopt catalog refresh -r us-east-1`"
    assert str(age_note(first, days, today=today)).startswith(told)
    files = {
        str(path.relative_to(BUNDLED)): path.read_text(encoding="utf-8")
        for path in BUNDLED.rglob("*")
        if path.is_file()
    }
    write_catalog(catalogs_home(), "us-east-1", "2026-11-18", files)
    before, newest = (write_catalog(catalogs_home(), "us-east-1", "2026-11-19", files) for _ in range(2))
    assert newest.name == "2026-11-19.1"
    assert refreshed_folders(catalogs_home(), "us-east-1") == (newest, before)
    assert in_use().directory == newest
    assert in_use("eu-west-2").directory == BUNDLED
    assert in_use("us-east-1", BUNDLED).directory == BUNDLED


def test_a_folder_that_is_no_catalogue_never_takes_the_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        write_catalog(tmp_path, "us-east-1", "2026-11-20", {"sources.json": "{}"})
    assert list((tmp_path / "us-east-1").iterdir()) == []
