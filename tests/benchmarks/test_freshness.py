"""How far results lie behind the code: what a benchmark runs is found, and only that counts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import _freshness
from benchmarks._freshness import REPOSITORY, ages, runs


@pytest.mark.parametrize(
    ("benchmark", "does", "does_not"),
    [
        ("auto", "trainer/policies/ratio/auto.py", "hetopt/cli/main.py"),
        ("balance", "trainer/worker.py", "optimizer/market/catalog_refresh.py"),
        ("command_line", "hetopt/cli/main.py", "benchmarks/auto.py"),
        ("topk_selection", "trainer/comm/topk.py", "optimizer/plan.py"),
    ],
)
def test_what_a_benchmark_runs_is_found(benchmark: str, does: str, does_not: str) -> None:
    files = {str(file) for file in runs(benchmark)}
    assert {f"benchmarks/{benchmark}.py", does} <= files
    assert does_not not in files
    assert all((REPOSITORY / file).is_file() for file in files)


def test_only_changes_of_what_it_runs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (tmp_path / "results").mkdir()
    told = {"benchmark": "one", "commit": f"{git('rev-parse', 'HEAD')}-dirty"}
    (tmp_path / "results" / "one.json").write_text(json.dumps(told))
    monkeypatch.setattr(_freshness, "REPOSITORY", tmp_path.resolve())
    monkeypatch.setattr(_freshness, "RESULTS", tmp_path / "results")
    for cached in (_freshness.imported, _freshness._file):
        cached.cache_clear()
    asked: list[tuple[str, ...]] = []
    answer = _freshness._git

    def counted(*arguments: str) -> str | None:
        asked.append(arguments)
        return answer(*arguments)

    monkeypatch.setattr(_freshness, "_git", counted)
    try:
        assert [(age.commits, age.lines, age.of_lines) for age in ages()] == [(0, 0, 2)]
        assert [arguments[0] for arguments in asked] == ["rev-list", "diff"], "one question each"
        (tmp_path / "hetopt" / "other.py").write_text("other = 2\n")
        git("commit", "-qam", "something else")
        assert [(age.commits, age.lines) for age in ages()] == [(1, 0)]
        (tmp_path / "hetopt" / "used.py").write_text("it = 2\n")
        git("commit", "-qam", "what it runs")
        assert [(age.commits, age.lines, age.at_least) for age in ages()] == [(2, 2, False)]
        (tmp_path / "results" / "one.json").write_text(json.dumps(told | {"commit": "0" * 40}))
        git("add", "results"), git("commit", "-qm", "measured at a commit that is not kept")
        (tmp_path / "hetopt" / "used.py").write_text("it = 3\n")
        git("commit", "-qam", "what it runs")
        assert [(age.commits, age.lines, age.at_least) for age in ages()] == [(1, 2, True)]
    finally:
        for cached in (_freshness.imported, _freshness._file):
            cached.cache_clear()


def test_a_commit_that_nobody_knows_has_no_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"benchmark": "auto", "commit": "0" * 40}))
    monkeypatch.setattr(_freshness, "RESULTS", tmp_path)
    assert ages() == [], "the file is in no commit either"
