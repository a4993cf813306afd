"""How gradients are communicated, as people say it and as the run is told; each bad value becomes one sentence.

``compression`` says what is sent: ``topk(0.01)``, ``dgc(1000x, momentum=0.9)``, ``powersgd(rank=2)``, ``dense``, or
``auto``. ``ratio_policy`` says who decides how much while the run goes on, ``collective`` which collective operation
aggregates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hetopt.core.comm.checked import checked
from hetopt.core.comm.composition import AUTO, COLLECTIVES, METHODS, why_not_controlled
from hetopt.core.comm.compression_text import IDENTITY, parse_compression
from hetopt.core.comm.ratio_controllers import CONTROLLERS, check_ratio_controller
from hetopt.core.errors import BadInput
from hetopt.core.names import known
from hetopt.core.policy_settings import RATIO_SETTINGS, Settings, parse_policy
from hetopt.core.run_spec import WEIGHS_WAYS, Compression, RatioPolicyName, RunSpec


@dataclass(frozen=True, kw_only=True)
class CompressionOverrides:
    """What was typed; None for what was not.

    Attributes:
        compression: to use, or to begin with.
        ratio_policy, ratio_settings: who decides the ratio, and how.
        collective: a name, or ``auto`` for the cheapest.
    """

    compression: Compression | None = None
    ratio_policy: RatioPolicyName | None = None
    ratio_settings: Settings | None = None
    collective: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was typed."""
        return self == CompressionOverrides()


def parse_wish(compression: str | None, ratio_policy: str | None, collective: str | None) -> CompressionOverrides:
    """Read the three options. ``auto`` leaves compressor, ratio and collective to the run unless they are named.

    Raises:
        BadInput: a name that is unknown, a value that cannot be, or two options that contradict each other.
    """
    asked = (
        None
        if compression is None or compression.strip() == AUTO
        else parse_compression(compression, option="`compression`")
    )
    policy, settings = parse_ratio_policy(ratio_policy)
    if compression is not None:
        if asked is None and policy not in (None, AUTO):
            raise BadInput(
                f'`compression="auto"` decides the ratio itself, and `ratio_policy={policy}` would decide it as well.',
                hint=f"name a compressor as well, for example `compression=topk(0.01)` and `ratio_policy={policy}`",
            )
        if policy is None:
            policy, settings = cast(RatioPolicyName, AUTO) if asked is None else "fixed", {}
    named = None if collective is None else known(collective.strip(), {AUTO: "", **COLLECTIVES}, "collective")
    if asked is not None and asked.collective != AUTO:
        if named not in (None, AUTO, asked.collective):
            raise BadInput(
                f"`compression` asks for the collective {asked.collective} and `collective` for {named}.",
                hint="name one of them",
            )
        named = named or asked.collective
    if named is None and policy == AUTO:
        named = AUTO
    return CompressionOverrides(compression=asked, ratio_policy=policy, ratio_settings=settings, collective=named)


def decide(wish: CompressionOverrides, run: RunSpec) -> RunSpec:
    """The run with the wish in it, if it can be.

    Raises:
        BadInput: compressor, memory, collective, options and ratio policy do not go together.
    """
    compression = wish.compression or run.compression
    policy = wish.ratio_policy or run.ratio_policy
    settings = run.ratio_settings if wish.ratio_settings is None else wish.ratio_settings
    if wish.compression is None and policy in WEIGHS_WAYS and not METHODS[compression.name].by_ratio:
        # Who weighs whole ways to exchange rounds as well: a plan that only rounds leaves it everything.
        compression = Compression()
    collective_policy = run.collective_policy
    if wish.collective == AUTO:
        collective_policy = "cheapest"
    elif wish.collective is not None:
        collective_policy = "fixed"
        compression = compression.model_copy(update={"collective": wish.collective})
    checked(compression)
    # Who weighs whole ways to exchange brings a compressor where the plan names none.
    if policy not in WEIGHS_WAYS or compression.name != IDENTITY:
        reason = why_not_controlled(compression.name, policy, compression.collective)
        if reason is not None:
            is_able = why_not_controlled(compression.name, policy) is None
            less = "name a compressor that can send less, for example `compression=topk(0.01)`"
            raise BadInput(reason, hint="leave `collective` out, or say all_gather" if is_able else less)
    if policy not in WEIGHS_WAYS:
        check_ratio_controller(policy, compression.ratio)
    if run.learning_rate_rule == "adascale" and (compression.name != IDENTITY or policy != "fixed"):
        raise BadInput(
            "The plan's learning rate follows the noise of the gradient, which nobody sees once it is compressed.",
            hint='plan again with another `learning_rate_rule`, or launch with `compression="dense"`',
        )
    changes = {
        "compression": compression,
        "ratio_policy": policy,
        "ratio_settings": settings,
        "collective_policy": collective_policy,
    }
    return run.model_copy(update=changes)


def parse_ratio_policy(text: str | None) -> tuple[RatioPolicyName | None, Settings | None]:
    """A ratio policy, and its settings: `gravac(window=50, eps=0.7)`.

    Raises:
        BadInput: there is no such policy, or it has no such setting.
    """
    if text is None:
        return None, None
    name, settings = parse_policy(text, CONTROLLERS, RATIO_SETTINGS, "`ratio_policy`", "ratio policy")
    return cast(RatioPolicyName, name), settings
