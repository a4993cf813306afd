"""How many threads workers have and how they wait, by this machine's limits and a person's wishes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.processes import LocalLauncher
from hetopt.core.interruption import (
    SPIN,
    SPIN_VARIABLES,
    THREADS_VARIABLE,
    openmp_environment,
    threads_of_each,
    usable_processors,
)
from hetopt.core.run_spec import RunSpec
from tests.trainer.scenarios import toy_spec
from tests.trainer.test_local_launcher import over

HERE = len(os.sched_getaffinity(0))
WISHES = st.dictionaries(st.sampled_from([*SPIN_VARIABLES, THREADS_VARIABLE, "OTHER"]), st.text(max_size=3))


@given(workers=st.integers(1, 99), wishes=WISHES)
def test_what_a_person_has_set_is_kept_and_workers_share_the_processors(workers: int, wishes: dict[str, str]) -> None:
    own = openmp_environment(workers, wishes)
    assert not set(own) & set(wishes)
    assert (THREADS_VARIABLE in own) != (THREADS_VARIABLE in wishes)
    assert set(SPIN) <= set(own) or set(SPIN_VARIABLES) & set(wishes)
    each = threads_of_each(workers)
    assert each == 1 or each * workers <= usable_processors()


@pytest.mark.parametrize(
    ("listed", "files", "processors"),
    [
        ("0::/\n", {}, HERE),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, HERE),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("0::/a\n", {"a/cpu.max": "25000 100000"}, 1),
        ("0::/a\n", {"a/cpu.max": f"{(HERE + 9) * 10**5} 100000"}, HERE),
        ("0::/../../b\n", {"cpu.max": "100000 100000"}, 1),
        ("4:memory:/m\n2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "20000", "cpu/a/cpu.cfs_period_us": "20000"}, 1),
        ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "20000"}, HERE),
        # In a container with the host's names, only the mount itself is its own group.
        ("2:cpu:/docker/x\n", {"cpu/cpu.cfs_quota_us": "30000", "cpu/cpu.cfs_period_us": "20000"}, 1),
        ("4:cpuset:/m\n", {"m/cpu.max": "1 2"}, HERE),
    ],
)
def test_a_quota_of_a_control_group_counts_as_processors(
    tmp_path: Path, listed: str, files: dict[str, str], processors: int
) -> None:
    (tmp_path / "cgroup").write_text(listed)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_processors(tmp_path / "cgroup", tmp_path / "mounted") == processors


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_processors(tmp_path / "none", tmp_path) == HERE


TELLS = """
import json, os
from pathlib import Path
from tests.trainer.toy_task import plain
def task():
    told = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")}
    Path(__file__).with_name(f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))
    return plain()
"""


@pytest.mark.parametrize("wish", [{}, {"GOMP_SPINCOUNT": "7"}])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_launched_worker_has_its_part_of_the_processors_and_spins_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, wish: dict[str, str]
) -> None:
    for name in (THREADS_VARIABLE, *SPIN_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "run").mkdir()
    toy = toy_spec(shares=(4,) * workers, stop={"max_steps": 2}) | {"task": f"{tmp_path / 'tells.py'}:task"}
    launcher = LocalLauncher()
    status = over(launcher, launcher.start(RunSpec.model_validate_json(json.dumps(toy)), tmp_path / "run", wish))
    assert status.state.value == "finished", status
    for rank in range(workers):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told == {THREADS_VARIABLE: str(threads_of_each(workers))} | SPIN | wish
