"""`hetopt estimate` and `hetopt.estimate`: the planner's answer for a job that was counted, and how sure it is."""

from __future__ import annotations

import datetime
import json
import math
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from typer.testing import CliRunner

import hetopt
from benchmarks import published
from benchmarks._gpu_throughput import folder
from benchmarks._utilisation_fit import (
    Z90,
    convolutions,
    coverage,
    jobs_left_out,
    sources_left_out,
    spread_of,
    transformers,
)
from hetopt.cli.main import app
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.interruption import Reporter
from hetopt.optimizer.model_counts import FULL, STATE_BYTES, Recipe, of_parameters
from hetopt.optimizer.step_time.device_memory import REPLICATED, blocks_of, schemes
from hetopt.optimizer.step_time.gpu_transfer import Gpu
from hetopt.optimizer.step_time.utilisation import REFERENCE, sample_s, utilisation_prior
from hetopt.reports import plan_document
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
    assert "3,000,000 x 128 tokens, 2.6e+17 FLOPs, budget $200.00" in told[0]


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
    told, asked = json.loads(run(f"{command} --json")), small(types="g5.xlarge", max_workers=2)
    assert told["flops"] == pytest.approx(6 * 1e8 * 128 * 1e5, rel=0.03), "6 N a token, and attention"
    assert told["plan"]["chosen"] == json.loads(asked.plan.to_json())["chosen"]


@pytest.mark.parametrize(
    ("params", "samples", "tokens"), [(1e6, 1e4, 64), (1e8, 1e6, 512), (1e9, 1e7, 64), (9e8, 1e5, 2048)]
)
def test_more_work_takes_longer(params: float, samples: float, tokens: int) -> None:
    one = small(params=params, samples=samples, tokens=tokens, types="g5.xlarge", max_workers=1)
    more = small(params=params, samples=2 * samples, tokens=tokens, types="g5.xlarge", max_workers=1)
    assert more.job.flops == pytest.approx(2 * one.job.flops, rel=1e-3)
    assert more.plan.chosen.prediction.training_s.value > 1.9 * one.plan.chosen.prediction.training_s.value
    for told in (one, more):
        step = told.plan.chosen.prediction.step_time_s
        assert 1.5 < step.high / step.value < 2.2, "as well as another person's job is known"
        ideal = told.job.flops / told.job.samples * told.job.batch_size / 70e12
        assert step.value > ideal, "no GPU is faster than its peak"


def test_each_gpu_that_is_named_has_a_way() -> None:
    shown = small(params=7e9, samples=5e4, tokens=2048, types=(), gpus=("H100", "A100"), max_workers=64).plan.choices
    gpus = [group.hardware.gpu for way in shown for group in way.candidate.groups]
    assert {"H100", "A100"} <= set(gpus)
    [other] = [way for way in shown if "other GPU" in way.names]
    assert {group.hardware.gpu for group in other.candidate.groups} == {"A100"}


@pytest.mark.parametrize(("gpus", "precision"), [(("A10G",), "bf16"), (("T4", "A10G"), "fp16"), ((), "bf16")])
def test_a_precision_is_one_that_the_named_gpus_compute_in(gpus: tuple[str, ...], precision: str) -> None:
    assert small(types=(), gpus=gpus).plan.run.precision == precision


def test_a_gpu_that_was_hardly_used_may_not_be_what_takes_the_time() -> None:
    job = {"samples": 3e6, "types": (), "gpus": "A100", "on": "A10G"}
    told, used = (small(**job, took=took) for took in ("3 days", "2 hours"))
    assert "The A10G was used at 1.3 % of its peak: if loading or Python is the reason" in " ".join(str(told).split())
    assert "was used at" not in str(used)
    gpus = len(told.plan.run.workers)
    assert told.plan.chosen.prediction.training_s.high * gpus > 3 * 86400, "as long as with no faster GPU"
    alone = small(
        params=None, samples=None, tokens=None, batch_size=None, took="3 days", on="A10G:2", gpus="A10G", types=()
    )
    assert "as suits so many FLOPs (`params`)" in " ".join(alone.job.assumed)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**BERT, "max_position_embeddings": 512}, "`tokens` must be at most 512"),
        ({**BERT, "model_type": "qwen3_moe"}, "num_experts is missing.*what a token passes"),
        ({**BERT, "model_type": "mixtral"}, "num_local_experts is missing.*what a token passes"),
        (
            {**BERT, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            "num_experts_per_tok must be at most num_local_experts, 8, got 9",
        ),
        (
            {**BERT, "model_type": "falcon", "hidden_size": "768"},
            "hidden_size must be a whole number from 1 to 10,000,000, got '768'",
        ),
        ({**BERT, "model_type": "vit", "patch_size": 500}, "patch_size must be at most image_size, 224, got 500"),
        ({"model_type": "resnet", "depths": [3, 4]}, "hidden_sizes and depths must list as many numbers"),
        ({"model_type": "swin", "depths": [3, 4]}, "depths and num_heads must list as many numbers"),
        ({"model_type": "convnext", "depths": [3, 4]}, "hidden_sizes and depths must list as many numbers"),
    ],
)
def test_a_configuration_says_what_it_lacks(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_attention_heads": 12, **config}), encoding="utf-8")
    with pytest.raises(BadInput, match=said):
        small(params=None, config=path, tokens=2048)


def test_a_configuration_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT), encoding="utf-8")
    told = small(params=None, config=path)
    assert told.job.model.parameters == 109_482_240
    assert told.plan.run.task == "bert"
    assert told.document.title.startswith("bert, 109 M parameters, ")
    assert "512 tokens a sample (`tokens`)" in small(params=None, config=path, tokens=None).job.assumed


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"params": None}, "give `params` or `config`"),
        ({"samples": None}, "give `samples` or `flops`"),
        ({"budget": 5}, "no parameter of estimate called 'budget': did you mean 'budget_usd'"),
        ({"flops": 1e18}, "`samples` and `flops` exclude each other"),
        ({"config": "config.json"}, "`params` and `config` exclude each other"),
        ({"params": "many"}, "`params` must be a number"),
        ({"params": -1}, "`params` must be a positive number"),
        ({"params": math.inf}, "`params` must be a number"),
        ({"params": 5}, "`params` must be from 1,000 to 1e\\+15, got 5"),
        ({"params": 1e18}, "`params` must be from 1,000 to 1e\\+15, got 1e\\+18"),
        ({"params": "1e308"}, "`params` must be from 1,000 to 1e\\+15, got 1e\\+308"),
        ({"samples": 1e300}, "no more than 1e\\+15"),
        ({"tokens": 0}, "`tokens` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"batch_size": 2.5}, "`batch_size` must be a whole number, got 2.5"),
        ({"took": "3h", "on": "100000000 x A10G"}, "`on` must be 1 to 100,000 GPUs"),
        (
            {"took": "3s", "on": "1 x A10G", "params": "110M", "samples": 3e6},
            "utilisation of 122,214 % of its peak, 70 TFLOP/s",
        ),
        ({"took": "3 days", "on": "GTX 1080 Ti", "samples": 3e6, "params": "7B"}, "utilisation of .* 11.3 TFLOP/s"),
        ({"took": "300 days", "on": "GTX 1080 Ti", "samples": 3e6, "params": "7B"}, "11.8 GB of memory, and a step of"),
        ({"took": "3000 days", "on": "8 x H100", "samples": 3e6, "params": "700B"}, "and a step .* takes .* of each"),
        ({"market": "own", "inventory": "hosts.toml", "region": "any"}, 'own"` plans for machines of your own'),
        ({"took": "3h", "on": "M2 Max"}, "M2 Max is made by Apple, and hetopt plans for NVIDIA's GPUs"),
        ({"took": "3h", "on": "-1 x A10G"}, "`on` must be 1 to 100,000 GPUs"),
        ({"took": "3h", "on": "8 x A100"}, "A100 is made with 40 GiB or 80 GiB.*write 'A100 40 GiB'"),
        ({"params": None, "config": "/dev/zero"}, "a device"),
        ({"params": None, "config": "none.json"}, "does not exist"),
        ({"precision": "int8"}, "no precision called 'int8'"),
        ({"deadline": "3"}, "`deadline` needs a unit"),
        ({"gpus": "A11"}, "A11"),
        ({"region": "moon"}, "moon"),
        ({"trainable": "1%"}, "trains all of a model"),
        ({"method": "lor"}, "no method called 'lor'"),
        ({"method": "lora", "trainable": "0"}, "must be above 0"),
        ({"optimizer": "lion"}, "no optimizer called 'lion'"),
    ],
)
def test_bad_wishes(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        small(**wish)


def test_the_best_region_is_named() -> None:
    anywhere, here = (small(region=region, budget_usd=200, objective="cheapest") for region in ("any", "us-east-1"))
    assert anywhere.plan.regions[0].region == anywhere.plan.chosen.groups[0].region
    assert anywhere.plan.chosen.prediction.cost_usd.value <= 1.03 * here.plan.chosen.prediction.cost_usd.value
    assert "is the best region" in " ".join(plan_document.region_notes(anywhere.plan))


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


def test_a_model_that_no_machine_holds_is_refused_with_the_reason() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"one sample: it needs .* of each of 8 GPUs that share"):
        hetopt.estimate(params=700e9, samples=1e6, tokens=1024, budget_usd=1e6)


def test_a_model_that_one_gpu_does_not_hold_is_shared_by_those_of_a_machine() -> None:
    told = run("estimate --params 7B --samples 50k --tokens 2048 --gpus H100 --market on-demand")
    assert "H100 80 GiB (8 share the model)" in " ".join(told.split())
    assert len(told.splitlines()) <= 24


@pytest.mark.parametrize("parameters", [1e8, 1.3e9, 7e9, 70e9])
def test_memory_schemes_hold_less_and_the_most_saving_is_last(parameters: float) -> None:
    model = of_parameters(parameters, 2048)
    memory, described = FULL.memory(model, 8, half=True), utilisation_prior().counted(model, "bf16")
    held = {scheme: scheme.held(memory, blocks_of(described)) for scheme in schemes(described, 8)}
    for scheme, part in held.items():
        assert part.kept_bytes == pytest.approx(memory.kept_bytes / scheme.shards, rel=1e-6)
        assert part.peak_bytes(8) <= memory.peak_bytes(8)
    assert next(iter(held)) == REPLICATED
    assert min(held, key=lambda scheme: held[scheme].peak_bytes(1)) == [*held][-1]


def test_an_estimate_is_refused_before_anything_is_asked_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small().plan.save(Path("plan.json"))
    result = CliRunner().invoke(app, ["launch", "plan.json"])
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
    for name, known in prior.convolution.items():
        assert 0.1 < known.share < 0.6, name
    for parameters in (1e8, 1e9, 1e10):
        model = of_parameters(parameters, 2048)
        counted = prior.counted(model, "bf16")
        share = 3 * model.forward_flops / (sample_s(counted, REFERENCE, "bf16") * 312e12)
        assert 0.25 < share < 0.65, "from what small models reach to what tuned large ones do"


@pytest.mark.parametrize("parameters", [1e8, 7e9])
def test_adapters_take_less_memory_and_fewer_operations(parameters: float) -> None:
    model = of_parameters(parameters, 2048)
    recipes = [FULL, Recipe(method="lora", trained=0.01), Recipe(method="qlora", trained=0.01)]
    kept = [recipe.memory(model, 1, half=True).kept_bytes for recipe in recipes]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == pytest.approx(16 * parameters, rel=1e-6)
    assert kept[1] == pytest.approx((2 * 0.99 + 16 * 0.01) * parameters, rel=1e-6)
    assert recipes[1].passes == pytest.approx(2.01)
    for optimizer, state in STATE_BYTES.items():
        assert Recipe(optimizer=optimizer).memory(model, 1, half=True).optimizer_bytes == pytest.approx(
            state * parameters
        )


@example(7e9, "lora", "g5", 64)
@given(st.floats(4e9, 8e9), st.sampled_from(["lora", "qlora"]), st.sampled_from(["g5", "g6"]), st.integers(8, 512))
@settings(max_examples=10)
def test_adapters_train_no_slower_on_a_machine_of_more_gpus(parameters: float, how: str, kind: str, batch: int) -> None:
    job = {"params": parameters, "method": how, "tokens": 2048, "batch_size": batch, "market": "on-demand"}
    took_s = [
        small(**job, types=f"{kind}.{size}", max_workers=gpus).plan.chosen.prediction.training_s.value
        for size, gpus in {"xlarge": 1, "12xlarge": 4, "48xlarge": 8}.items()
    ]
    assert took_s == sorted(took_s, reverse=True)


def test_what_an_account_may_not_rent_is_said_first_and_what_is_known_of_it_counts() -> None:
    unknown = run("estimate --params 1B --samples 1M --tokens 2048").splitlines()
    assert unknown[1].startswith("Needs a quota of 192 vCPUs")
    vcpus = [int(number.replace(",", "")) for number in re.findall(r"quota\s+([\d,]+) vCPUs", " ".join(unknown))]
    assert max(vcpus) <= 192
    assert "B200" not in " ".join(unknown), "machines that are sold ahead"
    free = run("estimate --params 1B --samples 1M --tokens 2048 --quota none --gpus B200")
    assert "B200" in free
    assert "a new account has" not in free


def test_a_wider_model_uses_a_gpu_better_and_a_faster_gpu_is_used_less() -> None:
    prior = utilisation_prior()

    def share(parameters: float, gpu: Gpu) -> float:
        model = of_parameters(parameters, 2048)
        return model.forward_flops / (sample_s(prior.counted(model, "bf16"), gpu, "bf16") * gpu.fp16_tflops)

    twice = replace(REFERENCE, fp16_tflops=2 * REFERENCE.fp16_tflops)
    for small, large in ((1e8, 1e9), (1e9, 1e10)):
        assert share(small, REFERENCE) < share(large, REFERENCE)
    assert share(1e9, twice) < share(1e9, REFERENCE)


@pytest.fixture(scope="module")
def data() -> Path:
    found = folder()
    if found is None or not (found.parent / "llm-throughput").is_dir():
        pytest.skip("the public throughputs are not at hand")
    return found


def test_transformers_of_sources_that_were_left_out_are_foretold(data: Path) -> None:
    left = list(sources_left_out(transformers(data)))
    alike: dict[object, list[float]] = defaultdict(list)
    for row, error in left:
        alike[row.cell].append(error)
    assert spread_of(left) <= 1.1 * utilisation_prior().transformer.log_sd, "as the prior says of itself"
    assert statistics.median(abs(statistics.fmean(errors)) for errors in alike.values()) < math.log(1.25)
    assert statistics.fmean(abs(error) <= Z90 * utilisation_prior().transformer.log_sd for _, error in left) >= 0.9


def test_published_trainings_are_foretold(data: Path) -> None:
    answers = list(published.answers(data.parent / "published-trainings.jsonl"))
    assert statistics.fmean(abs(answer.log_ratio) <= math.log(1.5) for answer in answers) >= 0.8
    assert statistics.median(abs(answer.log_ratio) for answer in answers) <= math.log(1.25)
    assert statistics.fmean(answer.is_inside for answer in answers) >= 0.8
    assert "MPT-7B 8 H100" in {answer.name for answer in answers}


@pytest.mark.slow
def test_convolutions_that_were_left_out_lie_within_their_intervals(data: Path) -> None:
    assert coverage(list(jobs_left_out(convolutions(data)))) >= 0.9
