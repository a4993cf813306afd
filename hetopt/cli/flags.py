"""The library's parameters as the command line spells them: `` `max_workers=8` `` in a message is ``--max-workers 8``.

The library names a parameter in backticks as Python has it, alone or with a value. At a terminal people type options,
so every text on its way there goes through `in_flags`. Commands, such as `` `hetopt stop RUN` ``, stay as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

FLAGS: Mapping[str, str] = {
    "accelerator": "--gpu",
    "accelerators_min": "--gpus-min",
    "accept_fewer": "--allow-partial",
    "accept_risk": "--accept-risk",
    "account": "--account",
    "architecture": "--arch",
    "aws_profile": "--profile",
    "batch_argument": "--batch-arg",
    "batch_policy": "--batch-policy",
    "batch_size": "--batch-size",
    "bucket": "--bucket",
    "budget_usd": "--budget",
    "canary": "--canary",
    "catalog": "--catalog",
    "collective": "--collective",
    "compression": "--compression",
    "confidence": "--confidence",
    "data": "--data",
    "data_region": "--data-region",
    "deadline": "--deadline",
    "disk_gb": "--disk",
    "ec2_data": "--ec2-data",
    "config": "--config",
    "epochs": "--epochs",
    "flops": "--flops",
    "params": "--params",
    "samples": "--samples",
    "tokens": "--tokens",
    "epoch_samples": "--epoch-samples",
    "everybody": "--everybody",
    "exclude": "--exclude",
    "families": "--family",
    "gpus": "--gpus",
    "hosts": "--hosts",
    "images": "--image",
    "inject": "--data-injection",
    "inventory": "--inventory",
    "instance_profile": "--instance-profile",
    "interruption_max": "--max-interruption",
    "journal": "--resume",
    "learning_rate_rule": "--lr-rule",
    "listen": "--listen",
    "machine_type": "--type",
    "market": "--market",
    "max_hourly_usd": "--max-hourly",
    "max_machines": "--max-machines",
    "max_workers": "--max-workers",
    "memory_min_gib": "--memory-min",
    "mixed_types": "--mixed-types",
    "model": "--model",
    "network_max_gbps": "--network-max",
    "network_min_gbps": "--network-min",
    "objective": "--objective",
    "observed": "--observed",
    "on": "--on",
    "partition": "--partition",
    "precision": "--precision",
    "price_max_usd_per_hour": "--price-max",
    "probe_budget_usd": "--probe-budget",
    "quotas": "--quota",
    "provisioning": "--provisioning",
    "rank": "--rank",
    "ratio": "--ratio",
    "ratio_policy": "--ratio-policy",
    "region": "--region",
    "restarts": "--max-restarts",
    "schedule": "--schedule",
    "seed": "--seed",
    "slowdowns": "--slowdown",
    "public_address": "--public-ip",
    "proxy": "--proxy",
    "security_group": "--security-group",
    "stand_in": "--stand-in",
    "steps": "--steps",
    "subnets": "--subnet",
    "stream": "--stream",
    "substitutes": "--substitute",
    "sync": "--sync",
    "target": "--target",
    "time_budget_s": "--time-budget",
    "time_weight": "--weights",
    "trials": "--trials",
    "types": "--types",
    "unprobed": "--unprobed",
    "vcpus_max": "--vcpus-max",
    "vcpus_min": "--vcpus-min",
    "workers": "--workers",
    "zone": "--zone",
}
"""The option of every parameter that a message of the library names."""

_NAMED = re.compile(r"`(?P<name>[a-z_0-9]+)(?:=(?P<value>[^`]*))?`")


def in_flags(text: str) -> str:
    """The text with options in place of the library's parameters; what is in backticks besides stays."""
    return _NAMED.sub(_flag, text)


def _flag(named: re.Match[str]) -> str:
    flag, value = FLAGS.get(named["name"]), named["value"]
    if flag is None:
        return named[0]
    return flag if value in (None, "True") else f"{flag} {_typed(value)}"


def _typed(value: str) -> str:
    """A Python value as an argument of a shell: in quotes where it needs them, lists and mappings without brackets."""
    if value[:1] in ("[", "("):
        value = value[1:-1].replace(", ", ",")
    elif value[:1] == "{":
        value = re.sub("[\"' ]", "", value[1:-1]).replace(":", "=")
    return shlex.quote(value[1:-1] if value[:1] in ("'", '"') else value)
