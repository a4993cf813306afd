"""A machine that was sampled, as plans know it, against what the model of the samples predicts: one answer."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.step_samples import Configuration, Node, StepSample
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.sampled import SampledMachines

TYPES = load_catalog().instance_types


def on_one(type_: str, batch: int) -> Configuration:
    return Configuration(nodes=(Node(type=type_, workers=1),), local_batch_size=batch)


@settings(max_examples=20)
@given(
    measured=st.sampled_from(["g4dn.xlarge", "g5.xlarge", "g6.xlarge"]),
    asked=st.sampled_from(["g4dn.2xlarge", "g5.xlarge", "g6.xlarge", "p4d.24xlarge"]),
    base=st.sampled_from([16, 32, 64]),
    fixed_s=st.floats(0.005, 0.1),
    sizes=st.integers(1, 3),
    ratio=st.sampled_from([0.25, 0.5, 1, 2, 4]),
)
def test_plans_and_predictions_agree_on_machines_that_were_sampled_and_on_their_relatives(
    measured: str, asked: str, base: int, fixed_s: float, sizes: int, ratio: float
) -> None:
    """Within a percent; where one batch size was measured, at that size, and else as near as a line is to a power."""
    rows = [
        StepSample(**on_one(measured, base << n).model_dump(), step_time_s=fixed_s + 0.002 * (base << n))
        for n in range(sizes)
    ]
    model = StepTimeModel.fit(observe(rows), TYPES)
    machine = SampledMachines(posterior=model.posterior, gradient_bytes=4e8, catalog=TYPES).machine(asked)
    assert machine is not None
    batch = round(base * ratio)
    (told,) = model.predict([on_one(asked, batch)])
    apart = abs(math.log((machine.fixed_s + batch * machine.per_sample_s) / told.step_time_s))
    assert machine.evidence == told.evidence
    assert apart < (0.25 if sizes == 1 and told.evidence == "extrapolated" and ratio != 1 else 0.015)
