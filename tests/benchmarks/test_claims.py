"""What README and the page of claims quote was measured on today's code, at a commit that there is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import _freshness
from benchmarks._freshness import REPOSITORY, has_history, runs, why_stale
from benchmarks._outcome import RESULTS
from benchmarks.claims import CLAIMS, Claim

RESULT_FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_a_quoted_figure_is_of_todays_code(path: Path) -> None:
    if not has_history():
        pytest.skip("no repository with all of its commits")
    reason = why_stale(json.loads(path.read_text(encoding="utf-8")))
    assert reason is None, f"{reason}: `make claims`, or take the result away; then `make docs`"


def test_there_are_at_most_ten_claims_and_no_result_that_nobody_quotes() -> None:
    assert len(CLAIMS) <= 10
    assert {path.stem for path in RESULT_FILES} <= {claim.benchmark for claim in CLAIMS}
    assert [path.stem for path in RESULT_FILES] == sorted(c.benchmark for c in CLAIMS if c.result() is not None)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.benchmark)
def test_a_claim_names_a_command_and_a_figure(claim: Claim) -> None:
    assert (REPOSITORY / "benchmarks" / f"{claim.benchmark}.py").exists()
    assert "{" in claim.sentence
    assert {len(names) for names in claim.plot.series.values()} == {len(claim.plot.groups)}


@pytest.mark.parametrize(
    ("benchmark", "does", "does_not"),
    [
        ("balance", "trainer/worker.py", "optimizer/market/catalog_refresh.py"),
        ("convergence", "optimizer/convergence/averaged_law.py", "benchmarks/balance.py"),
    ],
)
def test_what_a_benchmark_runs_is_found(benchmark: str, does: str, does_not: str) -> None:
    files = {str(file) for file in runs(benchmark)}
    assert {f"benchmarks/{benchmark}.py", does} <= files
    assert does_not not in files


def test_a_result_is_stale_once_what_it_runs_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a repository of its own: a benchmark, what it imports, and something else."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    files = {
        "benchmarks/one.py": "from hetopt.used import it\n",
        "hetopt/used.py": "it = 1\n",
        "hetopt/other.py": "other = 1\n",
    }
    git("init", "-q")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git("add", "."), git("commit", "-qm", "measured")
    monkeypatch.setattr(_freshness, "REPOSITORY", tmp_path.resolve())
    for cached in (_freshness.imported, _freshness._file):
        cached.cache_clear()
    try:
        commit = git("rev-parse", "HEAD")
        result = {"benchmark": "one", "commit": commit}
        assert why_stale(result) is None
        assert "changes on top" in str(why_stale(result | {"commit": f"{commit}-dirty"}))
        assert "not in this history" in str(why_stale(result | {"commit": "0" * 40}))
        (tmp_path / "hetopt" / "other.py").write_text("other = 2\n")
        git("commit", "-qam", "something else")
        assert why_stale(result) is None
        (tmp_path / "hetopt" / "used.py").write_text("it = 2\n")
        git("commit", "-qam", "what it runs")
        assert "lines were changed" in str(why_stale(result))
    finally:
        for cached in (_freshness.imported, _freshness._file):
            cached.cache_clear()
