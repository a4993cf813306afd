"""What can be combined with what: every compressor with its residuals and collectives, and why the rest is refused.

One table, so that the command line, the planner, the price list and the tests speak of the same methods; how each is
done is registered under the same name in `hetopt.trainer.comm.methods`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import either, known

AUTO = "auto"
"""The name that stands for the compressor's default memory or collective."""

DENSE = "all_reduce"
GATHER = "all_gather"
STAR, VAR, AR_TOPK = "ar_topk_star", "ar_topk_var", "ar_topk"

PLAIN, PACKED, PACKED_BF16 = "plain", "packed", "packed_bf16"

NONE, FEEDBACK, CORRECTION = "none", "error_feedback", "momentum_correction"

COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {
        DENSE: "payloads are summed on the way",
        GATHER: "every worker receives every payload and sums them itself",
        AR_TOPK: "one worker's choice of elements is shared, then their values are summed; who chooses, is chosen",
        STAR: "the same, workers choose in turn",
        VAR: "the same, the worker chooses whose choice holds most energy",
    }
)
"""Every collective that carries payloads, with what it does."""

MEMORIES: Mapping[str, str] = MappingProxyType(
    {
        NONE: "what is not sent is forgotten",
        FEEDBACK: "what is not sent is added to the next gradient",
        CORRECTION: "the same for the momentum, which the workers keep themselves (DGC)",
    }
)
"""Every gradient memory, with what becomes of elements that are not sent."""

CODINGS: Mapping[str, str] = MappingProxyType(
    {
        PLAIN: "selected elements take four bytes for their index and four for their value",
        PACKED: "indices take about 2 + log2(n / k) bits",
        PACKED_BF16: "the same, and values are rounded to bf16; the rounding is remembered with the rest",
    }
)
"""Every coding of selected elements, with the bytes that it takes."""

LOW_PRECISION = ("identity", "fp16", "bf16", "int8", "int4")
"""Compressors that send every element in 32 bits or fewer: parameters can be averaged by them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """The properties of a compressor, and the collectives, memories and options that go with it.

    Attributes:
        about: what the compressor sends, in a few words.
        collectives: names of collectives that can carry it; the first is the default.
        memories: names of gradient memories that go with it; the first is the default.
        by_ratio: whether ``ratio`` decides how much is sent.
        same_size: whether every worker's payload has the same size, known beforehand.
        nested: whether selecting from a selection gives what selecting at once would (up to how exact the selection
            is).
        by_shape: whether it needs the shapes of the parameters, and so the whole gradient at once.
        options: further fields of `Compression` that have an effect.
        wire_bytes: returns a worker's payload bytes, given the number of elements and the ratio; None:
            `payload_bytes.operations` computes them.
    """

    about: str
    collectives: tuple[str, ...]
    memories: tuple[str, ...]
    by_ratio: bool = False
    same_size: bool = True
    nested: bool = False
    by_shape: bool = False
    options: tuple[str, ...] = ()
    wire_bytes: Callable[[int, float], int] | None = None


OF_CORRECTION = ("momentum", "clip_norm")
"""Fields of a `Compression` that momentum correction alone has a use for."""
_IN_LEVELS = ("floor_ratio", "least_gain")
_THRESHOLD = Method(
    about="magnitudes above a threshold",
    collectives=(GATHER,),
    memories=(FEEDBACK, CORRECTION),
    by_ratio=True,
    same_size=False,
    nested=True,
    options=(*_IN_LEVELS, "coding", *OF_CORRECTION),
)
_SELECTION = replace(_THRESHOLD, collectives=(GATHER, AR_TOPK, STAR, VAR), same_size=True)
_ROUNDED = Method(
    about="everything, rounded", collectives=(DENSE,), memories=(NONE, FEEDBACK), options=("bits", "levels")
)
_ROTATION = replace(_ROUNDED, memories=(FEEDBACK, NONE), by_ratio=True)

_METHODS: dict[str, Method] = {
    # With a memory: what was held back while something else was in use goes out with it.
    "identity": Method(
        about="everything, in fp32",
        collectives=(DENSE,),
        memories=(NONE, FEEDBACK, CORRECTION),
        options=OF_CORRECTION,
    ),
    "fp16": Method(about="everything, in scaled fp16", collectives=(DENSE,), memories=(NONE, FEEDBACK)),
    "bf16": Method(about="everything, in bf16", collectives=(DENSE,), memories=(NONE, FEEDBACK)),
    "int8": Method(
        about="everything, in whole codes of 8 bits, 64 of which share a scale",
        collectives=(DENSE,),
        memories=(FEEDBACK, NONE),
    ),
    "int4": Method(
        about="everything, in whole codes of 4 bits, 64 of which share a scale",
        collectives=(DENSE,),
        memories=(FEEDBACK,),
    ),
    "topk": replace(_SELECTION, about="the largest magnitudes of the whole gradient"),
    "mstopk": replace(_SELECTION, about="about the largest magnitudes, by 25 bisections"),
    "dgc": replace(
        _THRESHOLD,
        about="magnitudes above a sampled threshold, with the momentum corrected",
        memories=(CORRECTION, FEEDBACK),
    ),
    "redsync": replace(_THRESHOLD, about="magnitudes above a threshold between mean and maximum"),
    "randomk": Method(
        about="random elements, the same on every worker",
        collectives=(DENSE,),
        memories=(FEEDBACK, NONE),
        by_ratio=True,
    ),
    "qsgd_maxnorm": replace(
        _ROUNDED,
        about="everything, rounded at random to levels of the largest magnitude",
        collectives=(DENSE, GATHER),
    ),
    "qsgd_two_scale": replace(_ROUNDED, about="the same, small elements on a finer scale"),
    "qsgd_multi_scale": replace(_ROUNDED, about="the same with three scales"),
    "global_randomk_maxnorm": replace(
        _ROTATION, about="elements in rotation, rounded to levels of the largest magnitude"
    ),
    "global_randomk_two_scale": replace(_ROTATION, about="elements in rotation, rounded on two scales"),
    "sign": Method(about="signs, and the mean magnitude", collectives=(GATHER,), memories=(FEEDBACK,)),
    "powersgd": Method(
        about="a factor pair of low rank for each matrix",
        collectives=(DENSE,),
        memories=(FEEDBACK,),
        by_shape=True,
        options=("rank",),
    ),
}

METHODS: Mapping[str, Method] = MappingProxyType(_METHODS)
"""The properties of every compressor by name; `register` adds to it."""


def register(name: str, method: Method) -> None:
    """Add a compressor's properties to the table `METHODS` under a new name.

    How it is computed is registered by `hetopt.trainer.comm.methods.register`.

    Args:
        name: name of the compressor.
        method: its properties.

    Raises:
        ValueError: the table has a compressor of this name already.
    """
    if name in _METHODS:
        raise ValueError(f"a compression method must have a name of its own, and there is one called {name!r}")
    _METHODS[name] = method


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A compressor with the memory and the collective that it is used with.

    Attributes:
        name: name of the compressor.
        memory: name of the gradient memory.
        collective: name of the collective.
    """

    name: str
    memory: str
    collective: str

    @property
    def method(self) -> Method:
        """The compressor's row of the table."""
        return METHODS[self.name]


def combine(name: str, *, memory: str = AUTO, collective: str = AUTO) -> Combination:
    """Return a compressor with its memory and collective, ``auto`` replaced by the compressor's defaults.

    Args:
        name: name of the compressor.
        memory: name of the gradient memory, or ``auto``.
        collective: name of the collective, or ``auto``.

    Raises:
        BadInput: a name is unknown (the nearest is named), or memory or collective do not go with the compressor.
    """
    method = METHODS[known(name, METHODS, "compressor")]
    chosen = Combination(
        name=name,
        memory=method.memories[0] if memory == AUTO else known(memory, MEMORIES, "gradient memory"),
        collective=method.collectives[0] if collective == AUTO else known(collective, COLLECTIVES, "collective"),
    )
    reason = why_not(name, chosen.memory, chosen.collective)
    if reason is not None:
        goes_with = f"{name} goes with {either(method.collectives)}, and with {either(method.memories)}"
        raise BadInput(reason, hint=goes_with)
    return chosen


def combinations() -> tuple[Combination, ...]:
    """Return every combination of compressor, memory and collective that goes together."""
    return tuple(
        Combination(name=name, memory=memory, collective=collective)
        for name, collective, memory in itertools.product(METHODS, COLLECTIVES, MEMORIES)
        if why_not(name, memory, collective) is None
    )


def why_not(name: str, memory: str, collective: str) -> str | None:
    """Return a sentence on why a compressor, memory and collective do not go together; None: they do.

    Args:
        name: name of the compressor.
        memory: name of the gradient memory, not ``auto``.
        collective: name of the collective, not ``auto``.

    Raises:
        KeyError: there is no such compressor.
    """
    method = METHODS[name]
    return first_that_applies(
        {
            f"What {name} sends does not travel by {collective}.": collective not in method.collectives,
            f"{name} does not go with the gradient memory {memory}.": memory not in method.memories,
        }
    )


def first_that_applies(rules: Mapping[str, bool]) -> str | None:
    """Return the first sentence in ``rules`` whose value is True; None: every value is False."""
    return next((sentence for sentence, applies in rules.items() if applies), None)


def why_not_averaged(name: str) -> str | None:
    """Return a sentence on why parameters cannot be averaged through a compressor; None: they can."""
    if name not in LOW_PRECISION:
        return (
            f"Workers that average parameters exchange no gradients, and {name} would leave most of what they have "
            f"learned out of an average; use {either(LOW_PRECISION)}."
        )
    return None


def why_not_controlled(name: str, controller: str, collective: str = AUTO) -> str | None:
    """Return a sentence on why a ratio controller cannot steer a compressor by a collective; None: it can.

    Args:
        name: name of the compressor.
        controller: name of the ratio policy, such as ``gravac``.
        collective: name of the collective, or ``auto``.
    """
    method, seeks = METHODS[name], controller == "gravac"
    return first_that_applies(
        {
            f"{name} sends the same amount at every ratio, so there is nothing for {controller} to decide.": (
                controller != "fixed" and not method.by_ratio
            ),
            f"GraVAC selects from a selection, which {name} cannot.": seeks and not method.nested,
            f"GraVAC looks at what each worker's own selection keeps; by {collective} one worker selects for all.": (
                seeks and collective in (AR_TOPK, STAR, VAR)
            ),
        }
    )


def why_not_optimised(memory: str, optimizer_momentum: float) -> str | None:
    """Return a sentence on why a gradient memory does not go with an optimizer's momentum; None: it does.

    Args:
        memory: name of the gradient memory.
        optimizer_momentum: the optimizer's own momentum; 0: it has none.
    """
    if memory == CORRECTION and optimizer_momentum != 0:
        return (
            "Momentum correction keeps the momentum in the workers; with momentum in the optimizer as well it would "
            "be applied twice."
        )
    return None
