"""What stands in for a job in a rehearsal exchanges and computes for as long as the job, and trains nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetopt
from hetopt.api.launching import prepare
from hetopt.api.options import Local
from hetopt.backends.emulation.iproute import BOX_BITS_PER_S
from hetopt.backends.emulation.plan import in_its_place, rehearse
from hetopt.backends.on_this_machine import LocalBackend
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.core.scaled_emulation import GRADIENT_BYTES, PARAMETERS, STAND_IN
from hetopt.optimizer.plan import Plan
from hetopt.trainer.tasks.stand_in import stand_in

HERE = ThisMachine(processors=2, operating_system="Linux")


@pytest.fixture(scope="module")
def estimated() -> Plan:
    """Of a transformer with 110 million parameters, on several machines."""
    asked = {"samples": 3e6, "tokens": 128, "budget_usd": 20, "market": "spot", "objective": "fastest"}
    return hetopt.estimate(params=1.1e8, gpus="A10G", quotas=("spot:g=40",), **asked).plan  # type: ignore[arg-type]


@given(st.integers(250_000, 2 * 10**9))
def test_an_exchange_takes_as_long_as_the_jobs(estimated: Plan, parameters: int) -> None:
    job = estimated.profile.job.model_copy(update={"parameters": parameters, "gradient_bytes": 4 * parameters})
    plan = estimated.model_copy(update={"profile": estimated.profile.model_copy(update={"job": job})})
    rehearsal = rehearse(plan, HERE, stands_in=True)
    assert rehearsal.run.miniature is not None
    assumed = [group.assumed for group in plan.chosen.groups for _ in range(group.machines)]
    for host, known in zip(rehearsal.run.miniature.hosts, assumed, strict=True):
        assert known is not None
        assert host.rate_bits_per_s is not None
        job_s = job.gradient_bytes / known.link_bytes_per_s
        if host.rate_bits_per_s < BOX_BITS_PER_S:
            assert 8 * GRADIENT_BYTES / host.rate_bits_per_s == pytest.approx(rehearsal.scale.time * job_s)


def test_machines_shares_and_times_are_the_plans(estimated: Plan) -> None:
    rehearsal = rehearse(estimated, HERE, stands_in=True)
    shares = [samples for group in estimated.chosen.groups for samples in group.local_batch_sizes]
    assert [worker.local_batch_size for worker in rehearsal.run.workers] == shares
    assert rehearsal.scale.time == 1, "what stands in costs nothing"
    said = estimated.chosen.prediction
    assert rehearsal.prediction.compute_s == pytest.approx(said.compute_s, rel=0.2)
    assert rehearsal.run.stop.max_steps == pytest.approx(said.steps.value, abs=1)
    assert rehearsal.run.task == STAND_IN
    assert rehearsal.run.precision == "fp32", "it is computed here"
    assert "losses mean nothing" in rehearsal.notes[0]


def test_its_gradient_is_whole_and_of_its_size() -> None:
    task = stand_in()
    model = task.model()
    data = task.data(None).train
    batch = (torch.stack([data[index][0] for index in range(8)]), torch.zeros(8))  # type: ignore[index]
    loss = task.loss(model, batch)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert sum(gradient.numel() for gradient in gradients if gradient is not None) == PARAMETERS
    assert all((gradient != 0).all() for gradient in gradients if gradient is not None)


def test_an_estimate_runs_nowhere_else(estimated: Plan) -> None:
    with pytest.raises(BadInput, match="estimate") as refused:
        prepare(estimated, LocalBackend(), Local())
    assert "rehearsal" in (refused.value.hint or "")


def test_its_profile_holds_together(estimated: Plan) -> None:
    """Shapes, numbers and bytes of the parameters are those of one model: the job's are all gone."""
    profile = in_its_place(estimated, HERE).profile
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
