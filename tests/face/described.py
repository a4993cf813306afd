"""Profiles of jobs on GPUs that nobody here has, made from public measurements: facts as medians, and where they stand.

A device has two batch sizes at least: where a source has one, the other follows from a fifth of the step being fixed,
which is what such jobs have on average (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from hetopt.core.profile import Device, Host, Job, Profile, StepTime

GIB = 2**30
FIXED = 0.19


def described(
    task: str,
    *,
    type: str,
    memory_gib: float,
    step_s: Mapping[int, float],
    sample_bytes: float,
    parameters: int,
    dataset_size: int,
    batch_size: int,
    forward_flops: float,
    precision: str = "fp32",
    learning_rate_rule: str = "sqrt",
) -> Profile:
    """A job on one GPU of a rented machine.

    Args:
        task: its name.
        type: of the machine.
        memory_gib: of its GPU.
        step_s: seconds of a step by local batch size.
        sample_bytes: of memory that a sample takes.
        parameters: of the model.
        dataset_size: samples.
        batch_size: the usual one.
        forward_flops: of a sample; a step is three of them.
        precision: of matrices.
        learning_rate_rule: of the batch size.
    """
    if len(step_s) == 1:
        [(size, seconds)] = step_s.items()
        step_s = {max(1, size // 4): seconds * (FIXED + (1 - FIXED) * max(1, size // 4) / size), size: seconds}
    times = tuple(
        StepTime(
            local_batch_size=size,
            step_time_s=seconds,
            samples_s=(seconds,) * 5,
            load_s=0.0,
            forward_s=0.33 * seconds,
            backward_s=0.62 * seconds,
            optimizer_s=0.05 * seconds,
            peak_memory_bytes=round(16 * parameters + sample_bytes * size),
        )
        for size, seconds in sorted(step_s.items())
    )
    return Profile.model_validate(
        Profile(
            created="2026-11-26T12:00:00+00:00",
            hetopt_version="0.1.0",
            seed=0,
            host=Host(
                cpu_model="Intel Xeon Platinum 8259CL",
                logical_cpus=48,
                memory_bytes=192 * GIB,
                operating_system="Linux",
                python_version="3.12",
                torch_version="2.13.0",
            ),
            job=Job(
                task=task,
                parameters=parameters,
                gradient_bytes=4 * parameters,
                dataset_size=dataset_size,
                batch_size=batch_size,
                learning_rate_rule=learning_rate_rule,
                target_metric="loss",
                target_value=1.0,
                target_higher_is_better=False,
                operators_per_step=1500,
                flops_per_sample=3 * forward_flops,
            ),
            devices=(
                Device(
                    type=type,
                    kind="cuda",
                    workers_per_host=1,
                    threads_per_worker=4,
                    precision=precision,
                    step_times=times,
                    memory_limit_bytes=round(memory_gib * GIB),
                    compressors=(),
                ),
            ),
            links=(),
            noise=(),
            gain=(),
            pilots=(),
            evaluation_s=None,
            startup_s=20.0,
            profiling_s=0.0,
        ).model_dump()
    )


BERT = described(
    "bert-squad",
    type="g4dn.xlarge",
    memory_gib=16,
    # Subramanya et al. 2023 (Sia, github.com/siasosp23/artifacts): BERT fine-tuning on an AWS T4.
    step_s={4: 0.4553, 6: 0.5694, 8: 0.7033, 11: 0.8553, 12: 0.9215},
    sample_bytes=0.9e9,
    parameters=108_893_186,
    dataset_size=88_641,
    batch_size=48,
    forward_flops=67.5e9,
)
"""BERT-base on SQuAD 1.1, sequences of 384 tokens, AdamW."""

NCF = described(
    "ncf-movielens",
    type="p4d.24xlarge",
    memory_gib=40,
    # lambdal/deeplearning-benchmark, A100_p4, TF32, 2020-11-05: 23.9 million samples a second at 4 million a batch.
    step_s={4_000_000: 4_000_000 / 23.947e6},
    sample_bytes=6e3,
    parameters=31_832_577,
    dataset_size=99_000_000,
    batch_size=1_048_576,
    forward_flops=2.0e5,
)
"""Neural collaborative filtering on MovieLens-20M, with negatives."""

RESNET101 = described(
    "resnet101-imagenet",
    type="p4d.24xlarge",
    memory_gib=40,
    # JunhongXu/pytorch-benchmark-volta, A100 40 GB SXM4, fp16, 2021-01-04: 217 images a second at 12 a batch.
    step_s={12: 12 / 217.27},
    sample_bytes=1.0e8,
    parameters=44_549_160,
    dataset_size=1_281_167,
    batch_size=256,
    forward_flops=15.7e9,
    precision="fp16",
)
"""ResNet-101 on ImageNet at 224 pixels, SGD."""

GPT2 = described(
    "gpt2-small",
    type="p4d.24xlarge",
    memory_gib=40,
    # lambdal/deeplearning-benchmark, A100 40 GB SXM4, BERT-base, AMP, 2022-11-19: 417 sequences a second of 67.5 GFLOP
    # forward; GPT-2-small has 290 GFLOP for 1,024 tokens.
    step_s={16: 16 / (416.78 * 67.5 / 290)},
    sample_bytes=1.0e9,
    parameters=124_439_808,
    dataset_size=230_000,
    batch_size=64,
    forward_flops=290e9,
    precision="fp16",
)
"""GPT-2-small, fine-tuned on WikiText-103's 118 million tokens in windows of 1,024."""
