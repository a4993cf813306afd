"""`hetopt catalog` as a person sees it: recorded text, JSON with units, and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetopt.cli.catalog import app
from hetopt.cli.flags import in_flags
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import _bundled, load_catalog
from tests.work import calls_of

Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: str) -> tuple[str, str]:
    """stdout and stderr of a command that succeeds."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def refused(*arguments: str) -> BadInput:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, BadInput), result.output
    assert result.stdout == ""
    return result.exception


def listed(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(run("list", "--json", *arguments)[0])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("list_a10g.txt", "list --gpu A10G --market spot"),
        ("list_eight_gpus.txt", "list --gpus-min 8 --sort price-per-gpu"),
        ("list_cpu.txt", "list --vcpus-min 16 --max-interruption 10% --sort price-per-coremark --limit 6"),
        ("list_without_prices.txt", "list --family c7i --region mx-central-1 --sort spot-saving --reverse -n 5"),
        ("list_fractions.txt", "list --family g6f,gr6f --sort memory --reverse"),
        ("show_g5.txt", "show g5.xlarge"),
        ("show_g7.txt", "show g7.2xlarge"),
        ("show_mac.txt", "show mac2.metal --region eu-west-2"),
    ],
)
def test_text(golden: Golden, name: str, arguments: str) -> None:
    text, _ = run(*arguments.split())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    golden(name, "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def test_every_price_in_json_has_date_and_source() -> None:
    rows = listed("--limit", "0")
    assert len(rows) == len(load_catalog().listings)
    for row in rows:
        for price in row["prices"]:
            assert price["usd_per_hour"] > 0
            assert price["date"].startswith("20")
            assert price["source"]
            assert price["region"] == "us-east-1"
            assert not (price["is_estimate"] and price["market"] == "on-demand")
        if row["interruption_band"]:
            assert set(row["interruption_band"]) == {"label", "date", "source"}


def test_json_tells_the_unknown_by_null() -> None:
    (row,) = listed("--family", "c9g", "--vcpus-max", "1")
    assert row["cores"] is None
    assert row["efa"] is None
    assert row["interruption_band"] is None
    assert row["spot_saving_percent"] == pytest.approx(80.68, abs=0.01)  # of its two prices, in no Advisor
    assert [price["market"] for price in row["prices"]] == ["on-demand", "spot"]


def test_show_json_holds_every_region_and_caveat() -> None:
    shown = json.loads(run("show", "g6f.large", "--json")[0])
    assert shown["region"] == "us-east-1"
    assert "us-east-1" in shown["regions_with_prices"]
    assert "mx-central-1" not in shown["regions_with_prices"]
    assert 0 < shown["cheapest_known"]["usd_per_hour"] < 0.202
    assert {caveat["about"] for caveat in shown["caveats"]} == {"accelerator"}
    shown = json.loads(run("show", "c7i.xlarge", "--region", "eu-west-2", "--json")[0])
    assert shown["prices"] == []
    assert shown["spot_saving_percent"] > 0
    assert len(shown["regions"]) > 20


def test_nothing_matches_is_an_answer_with_the_reason() -> None:
    text, said = run("list", "--gpu", "A10G", "--price-max", "0.1")
    assert text == ""
    assert "No instance type in us-east-1 matches:" in said
    assert "8 without --price-max 0.1" in " ".join(said.split())
    text, said = run("list", "--gpu", "A10G", "--price-max", "0.1", "--json")
    assert json.loads(text) == []
    assert "8 without --price-max 0.1" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ("show g5.xlrge", "no instance type called 'g5.xlrge'", "g5.xlarge"),
        ("list --region us-esat-1", "no region called 'us-esat-1'", "us-east-1"),
        ("show g5.xlarge --region mars", "no region called 'mars'", "us-east-1"),
        ("list --gpu A1OG", "no accelerator called 'A1OG'", "A10G"),
        ("list --family c7j", "no family called 'c7j'", "c7i"),
        ("list --max-interruption often", "--max-interruption must be a percentage", "10%"),
        ("list --max-interruption 0", "--max-interruption must be a percentage", "10%"),
        ("list --max-interruption nan", "--max-interruption must be a percentage", "10%"),
        ("list --price-max nan", "--price-max must be an amount in USD", "$20"),
        ("list --price-max -1", "--price-max must be a positive number", "--price-max"),
        ("list --memory-min -1", "--memory-min must be a positive number", "--memory-min"),
        ("list --network-min inf", "--network-min must be a number", "write"),
        ("list --region ca-west-1 --price-max 3", "no prices for ca-west-1", "refresh --region ca-west-1"),
        ("list --region ca-west-1 --market on-demand", "no prices for ca-west-1", "refresh --region ca-west-1"),
        ("list --sort beauty", "no sort called 'beauty'", "price-per-vcpu"),
        ("list --arch sparc", "no architecture called 'sparc'", "arm64"),
        ("list --vcpus-min 0", "--vcpus-min must be at least 1, got 0", "--vcpus-min"),
        ("list --catalog nowhere", "nowhere/sources.json does not exist", "--catalog"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: str, said: str, hint: str) -> None:
    error = refused(*arguments.split())
    assert said in in_flags(error.message)
    assert hint in in_flags(error.hint or "")


def test_prices_in_several_regions_are_compared(small: Path) -> None:
    path = small / "regions" / "eu-west-2.csv"
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    assert header.startswith("instance_type,on_demand_usd_per_hour,")
    lines = [header, *(re.sub(r",[0-9.]+,", ",0.5,", row, count=1) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    shown = json.loads(run("show", "g5.xlarge", "--catalog", str(small), "--json")[0])
    assert shown["regions_with_prices"] == ["eu-west-2", "us-east-1"]
    assert shown["cheapest_known"]["region"] == "eu-west-2"
    assert "Cheapest of the 2 regions with prices: eu-west-2" in run("show", "g5.xlarge", "--catalog", str(small))[0]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hetopt.optimizer.market.catalog", {"numpy", "torch", "pydantic", "optuna", "rich", "typer", "boto3"}),
        (
            "hetopt.cli.catalog",
            {"numpy", "torch", "pydantic", "optuna", "boto3", "hetopt.optimizer.market.catalog"},
        ),
    ],
)
def test_importing_brings_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; sys.exit(' '.join({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_loading_is_quick_and_happens_once() -> None:
    _bundled.cache_clear()
    assert calls_of(load_catalog) < 500_000
    assert calls_of(load_catalog) < 10
