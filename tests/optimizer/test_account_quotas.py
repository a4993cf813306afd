"""The account's own quotas: kept by the doctor, used by plans; the least increase is named as AWS names it."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hetopt.core.errors import BadInput
from hetopt.core.interruption import Reporter
from hetopt.optimizer.market.account_quotas import AccountQuotas, account_quotas_file, keep_quotas
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.offer_filter import Wishes, narrow
from hetopt.optimizer.market.quota import Bucket, read_quotas

NOW = datetime.datetime(2026, 11, 26, 12, tzinfo=datetime.UTC)
SOME = {Bucket(market="spot", family="standard"): 64, Bucket(market="on-demand", family="g"): 8}


def test_what_was_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "home" / "account-quotas.json"
    keep_quotas(path, "123456789012", "us-east-1", SOME, NOW)
    keep_quotas(path, "123456789012", "eu-west-1", {}, NOW)
    known = AccountQuotas.load(path)
    assert known.of("us-east-1") == SOME
    assert set(known.regions) == {"us-east-1", "eu-west-1"}
    assert known.of("eu-central-1") is None
    assert list(keep_quotas(path, "210987654321", "us-east-1", {}, NOW).regions) == ["us-east-1"], "another account"


@pytest.mark.parametrize(("hours", "said"), [(3, "read 2026-11-26"), (73, "read 3 days ago"), (30, "read 1 day ago")])
def test_old_ones_say_so(tmp_path: Path, hours: int, said: str) -> None:
    known = keep_quotas(tmp_path / "q.json", "123456789012", "us-east-1", SOME, NOW)
    told = known.age_in_words("us-east-1", NOW + datetime.timedelta(hours=hours))
    assert told.startswith(said)
    assert ("hetopt doctor" in told) == (hours > 24)


def test_a_damaged_file_is_refused_by_plans_and_written_anew_by_the_doctor(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    for damaged in ('{"kind": "account-quo', "[]", "\x00", '{"kind": "plan"}'):
        path.write_text(damaged)
        with pytest.raises(BadInput):
            AccountQuotas.load(path)
        assert keep_quotas(path, "123456789012", "us-east-1", SOME, NOW) == AccountQuotas.load(path)


def test_a_plan_takes_the_accounts_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetopt.api.planning import _quotas

    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    notes: list[str] = []
    told = Reporter(note=notes.append)
    assert _quotas((), "us-east-1", told) == ()
    keep_quotas(account_quotas_file(), "123456789012", "us-east-1", SOME, NOW)
    assert read_quotas(_quotas((), "us-east-1", told)) == SOME
    assert "123456789012" in notes[-1]
    assert _quotas((), "eu-west-1", told) == (), "nobody asked there"
    assert _quotas(("g=8",), "us-east-1", told) == ("g=8",)
    assert read_quotas(["none"]) == {}


def test_the_least_increase_is_named_as_the_console_names_it() -> None:
    wishes = Wishes(gpus=("T4",), market="any", quotas=read_quotas(["default"]))
    with pytest.raises(BadInput) as caught:
        narrow(load_catalog("us-east-1"), wishes)
    assert caught.value.hint is not None
    assert "'All G and VT Spot Instance Requests' (L-3819A6DF) to 4 vCPUs" in caught.value.hint
