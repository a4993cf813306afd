"""`hetopt estimate` and `hetopt.estimate`: the planner's answer for a job that was counted, and how sure it is."""

from __future__ import annotations

import datetime
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hetopt
from benchmarks._gpu_throughput import folder
from benchmarks._utilisation_fit import counted, coverage, estimated, left_out
from hetopt.cli.main import app
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.interruption import Reporter
from hetopt.optimizer.step_time.utilisation import REFERENCE, utilisation_prior
from tests.work import counted_command

COMMAND = "estimate --params 110M --samples 3M --tokens 128 --budget 200"
BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
}


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def run(command: str) -> str:
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def small(**more: Any) -> hetopt.Estimate:
    """Of few machines, so that many are made in a moment."""
    return hetopt.estimate(
        **{"params": 1e8, "samples": 1e5, "tokens": 128, "types": "g5.*,g6.*", "max_workers": 8, **more}
    )


def test_the_answer_is_one_screen() -> None:
    told = run(COMMAND).splitlines()
    assert len(told) <= 22
    assert max(map(len, told)) <= 80
    assert "3,000,000 x 128 tokens, 2.5e+17 FLOPs, budget $200.00" in told[0]


def test_only_prices_that_are_shown_are_called_old() -> None:
    notes: list[str] = []
    told = small(reporter=Reporter(note=notes.append))
    days = {
        (datetime.datetime.now(datetime.UTC).date() - datetime.date.fromisoformat(group.price_date)).days
        for way in told.plan.choices
        if way.candidate is not None
        for group in way.candidate.groups
    }
    (note,) = [note for note in notes if "days old" in note]
    ages = {int(number) for number in re.findall(r"\d+", note.partition(" days old")[0])}
    assert ages == {min(days), max(days)}


def test_json_tells_the_same() -> None:
    command = "estimate --params 1e8 --samples 1e5 --tokens 128 --types g5.xlarge --max-workers 2"
    told = json.loads(run(f"{command} --json"))
    assert told["flops"] == pytest.approx(6 * 1e8 * 128 * 1e5)
    chosen = told["plan"]["chosen"]
    assert {group["evidence"] for group in chosen["groups"]} == {"counted"}


@pytest.mark.parametrize(
    ("params", "samples", "tokens"), [(1e6, 1e4, 64), (1e8, 1e6, 512), (1e9, 1e7, 64), (9e8, 1e5, 2048)]
)
def test_more_work_takes_longer(params: float, samples: float, tokens: int) -> None:
    one = small(params=params, samples=samples, tokens=tokens, types="g5.xlarge", max_workers=1)
    more = small(params=params, samples=2 * samples, tokens=tokens, types="g5.xlarge", max_workers=1)
    assert more.flops == pytest.approx(2 * one.flops, rel=1e-3)
    assert more.plan.chosen.prediction.training_s.value > 1.9 * one.plan.chosen.prediction.training_s.value
    for told in (one, more):
        step = told.plan.chosen.prediction.step_time_s
        assert step.high / step.value > 3, "nobody knows a step from its FLOPs within a factor of three"
        ideal = told.flops / told.samples * told.batch_size / 70e12
        assert step.value > ideal, "no GPU is faster than its peak"


def test_a_configuration_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT), encoding="utf-8")
    told = small(params=None, config=path)
    assert told.model.parameters == 109_482_240
    assert told.plan.run.task == "bert"


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"params": None}, "give `params` or `config`"),
        ({"samples": None}, "give `samples` or `flops`"),
        ({"flops": 1e18}, "`samples` and `flops` exclude each other"),
        ({"config": "config.json"}, "`params` and `config` exclude each other"),
        ({"params": "many"}, "`params` must be a number"),
        ({"params": -1}, "`params` must be a positive number"),
        ({"params": math.inf}, "`params` must be a number"),
        ({"params": 5}, "`params` must be at least 1,000, got 5"),
        ({"params": 1e18}, "no more than 1e\\+15"),
        ({"samples": 1e300}, "no more than 1e\\+15"),
        ({"tokens": 0}, "`tokens` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"precision": "int8"}, "no precision called 'int8'"),
        ({"deadline": "3"}, "`deadline` needs a unit"),
        ({"gpus": "A11"}, "A11"),
        ({"region": "moon"}, "moon"),
    ],
)
def test_bad_wishes(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        small(**wish)


def test_the_best_region_is_named() -> None:
    anywhere, here = (small(region=region, budget_usd=200, objective="cheapest") for region in ("any", "us-east-1"))
    assert anywhere.plan.regions[0].region == anywhere.plan.chosen.groups[0].region
    assert anywhere.plan.chosen.prediction.cost_usd.value <= 1.03 * here.plan.chosen.prediction.cost_usd.value
    assert "is the best region" in run(f"{COMMAND} --region any")


def test_hostile_configurations_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, said in (
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "holds no fields"),
        ('{"model_type": "bert", "hidden_size": ' + "9" * 400 + "}", "too large"),
        ('{"model_type": "\u202ebert"}', "model_type is"),
        ("<html>Sign in</html>", "not complete JSON"),
        (json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "evil.Model"}}), "vocab_size is missing"),
        (" " * 2_000_000, "larger than 1 MB"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(BadInput, match=said):
            small(params=None, config=path)
    with pytest.raises(BadInput, match="a device"):
        small(params=None, config="/dev/zero")
    with pytest.raises(BadInput, match="does not exist"):
        small(params=None, config=tmp_path / "none.json")


def test_a_model_that_no_gpu_holds_is_refused_with_the_reason() -> None:
    with pytest.raises(
        NoFeasiblePlan, match=r"70 B parameters with Adam takes 1.29 TB on every GPU, and B200, the largest"
    ):
        hetopt.estimate(params=70e9, samples=1e6, tokens=1024, budget_usd=1e6)


@pytest.mark.parametrize("command", ["launch", "export --skypilot task.yaml", "export --torchrun cluster"])
def test_an_estimate_is_refused_before_anything_is_asked_or_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small().plan.save(Path("plan.json"))
    result = CliRunner().invoke(app, [*command.split(), "plan.json"])
    assert isinstance(result.exception, BadInput)
    assert "This plan is an estimate" in str(result.exception)
    assert "Where?" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_limits_are_kept_or_refused() -> None:
    told = small(deadline="2d", budget_usd="$50")
    assert told.plan.goal.deadline_s == 2 * 86400
    with pytest.raises(NoFeasiblePlan):
        small(params=1e9, samples=1e9, budget_usd=1)


def test_it_needs_no_torch_and_little_work_and_memory() -> None:
    command = counted_command(*COMMAND.split())
    assert "torch" not in command.modules
    assert command.calls < 2_000_000
    assert command.memory_kib < 400_000


def test_the_prior_is_of_what_gpus_can_do() -> None:
    prior = utilisation_prior()
    for name, one in prior.by_kind.items():
        assert 0.1 < one.share < 0.6, name
        assert math.exp(1.645 * one.log_sd) > 2, "wide: a job was counted, not measured"
    assert prior.step_time_s("transformer", "bf16", 0.0) == prior.fixed_s
    long = prior.step_time_s("transformer", "bf16", 1e18)
    assert long == pytest.approx(1e18 / (prior.of("transformer", "bf16").share * 312e12), rel=0.01)
    assert REFERENCE.tflops("bf16") == 312


@pytest.fixture(scope="module")
def rows() -> Any:
    data = folder()
    if data is None:
        pytest.skip("the public throughputs are not at hand")
    return counted(data)


def test_intervals_hold_for_public_jobs(rows: Any) -> None:
    found = [one for row in rows for one in estimated(row, utilisation_prior())]
    for kind in ("transformer", "convolution"):
        own = [one for one in found if one.row.kind == kind]
        assert len({one.row.column.job for one in own}) >= 6
        assert coverage(own) >= 0.9, kind


@pytest.mark.slow
def test_intervals_hold_for_jobs_that_were_left_out(rows: Any) -> None:
    found = list(left_out(rows))
    for kind, widened in (("transformer", 2.1), ("convolution", 1.0)):
        assert coverage([one for one in found if one.row.kind == kind], widened) >= 0.9
