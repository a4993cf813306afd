"""What a model has and computes, counted from a few of its numbers: parameters, operations, and activations to keep.

    forward of a token     2 N + 4 s a L        N: weights that it is multiplied with, the output's included; s tokens
                                                in a sequence; a: width of all heads; L layers
                                                (Kaplan et al. 2020, table 1; Chowdhery et al. 2022, appendix B)
    training               3 x forward          backward multiplies each matrix twice: 6 N (Hoffmann et al. 2022)
    activations of a token L (18 h + 4 f)       bytes in 16 bits; h: width, f: inner width, or 8 f where it is gated
                                                (Korthikanti et al. 2022, section 4.1; no matrix of attention is kept)
    convolution            2 k^2 c_in c_out     for each place of its output

Attention is counted in full, also where it looks back alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hetopt.core.errors import BadInput

Kind = Literal["transformer", "convolution"]

TOKENS_A_PARAMETER = 20
"""Of a training run that makes the best of its operations (Hoffmann et al. 2022, table 3)."""

WIDTH_OVER_DEPTH = 64
"""Of GPT-2 and BERT, where nothing is known but the number of parameters."""

LARGEST = 10_000_000
"""No number of a configuration is larger: vocabularies end below 300,000."""


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    """Parameters, operations and activation bytes of a model, counted and not measured.

    Attributes:
        name: what it is, in a few words.
        parameters: all of them.
        forward_flops: of one sample, in its forward pass.
        attention_flops: of these, products of queries, keys and values.
        activation_bytes: of one sample, kept for the backward pass in 16 bits.
        layers: one behind the other.
        sample: what one sample is, in words.
    """

    name: str
    kind: Kind
    parameters: int
    forward_flops: float
    activation_bytes: float
    layers: int
    sample: str
    attention_flops: float = 0.0


def of_parameters(parameters: float, tokens: int) -> ModelCount:
    """Return the counts of a transformer with so many parameters: ``2 N + 4 s h L`` a token, shaped as GPT-2.

    From ``N = 12 L h^2`` and ``h = 64 L``. Embeddings are part of ``N``.
    """
    width = (WIDTH_OVER_DEPTH * parameters / 12) ** (1 / 3)
    layers = max(1, round(width / WIDTH_OVER_DEPTH))
    attention_flops = 4.0 * tokens**2 * width * layers
    return ModelCount(
        name=f"{_short(parameters)} parameters",
        kind="transformer",
        parameters=math.ceil(parameters),
        forward_flops=2 * parameters * tokens + attention_flops,
        attention_flops=attention_flops,
        activation_bytes=34.0 * width * layers * tokens,
        layers=layers,
        sample=sequence(tokens),
    )


def of_flops(flops: float) -> float:
    """Return the parameters of a transformer that makes the best of so many operations: ``C = 6 N D``, ``D = 20 N``."""
    return math.sqrt(flops / (6 * TOKENS_A_PARAMETER))


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Fields of a model's configuration; all that is wrong with them is refused together."""

    values: Mapping[str, Any]
    wrong: list[str]

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of the named fields that is there, a whole number."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST:
                return value
            self.wrong.append(f"{name} must be a whole number from {least} to {LARGEST:,}")
            return least or 1
        if default is None:
            self.wrong.append(f"{names[0]} is missing")
            return 1
        return default

    def wholes(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return a field's list of whole numbers, one a stage."""
        value = self.values.get(name, list(default))
        if (
            isinstance(value, list)
            and 0 < len(value) <= 64
            and all(isinstance(entry, int) and not isinstance(entry, bool) and 1 <= entry <= LARGEST for entry in value)
        ):
            return tuple(value)
        self.wrong.append(f"{name} must be a list of whole numbers")
        return default

    def each(self, name: str, count: int, *, default: int) -> tuple[int, ...]:
        """Return a whole number for each of so many stages, from a list of them or one for all."""
        if not isinstance(self.values.get(name), list):
            return (self.whole(name, default=default),) * count
        numbers = self.wholes(name, (default,) * count)
        if len(numbers) != count:
            self.wrong.append(f"{name} must have {count} numbers")
        return (*numbers, *(default,) * count)[:count]

    def texts(self, name: str, count: int, *, default: str) -> tuple[str, ...]:
        """Return a name for each of so many stages."""
        value = self.values.get(name, [default] * count)
        if isinstance(value, list) and len(value) == count and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        self.wrong.append(f"{name} must be a list of {count} names")
        return (default,) * count

    def ratio(self, name: str, default: float) -> float:
        """Return a field that is the ratio of two widths, above 0 and at most 64."""
        value = self.values.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 64:
            return float(value)
        self.wrong.append(f"{name} must be a number above 0, at most 64")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a field that is true or false."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    @property
    def labels(self) -> int:
        """The number of classes of a classifier; 2 where the configuration says nothing, as in the library."""
        named = self.values.get("id2label")
        return min(len(named), LARGEST) if isinstance(named, dict) and named else self.whole("num_labels", default=2)

    def refuse(self) -> None:
        """Refuse a configuration with wrong fields, naming all of them.

        Raises:
            BadInput: something was.
        """
        if self.wrong:
            raise BadInput(
                f"The configuration cannot be counted: {'; '.join(dict.fromkeys(self.wrong))}.",
                hint="correct it, or give the number of parameters with `params`",
            )


def _short(number: float) -> str:
    """Return a number in short, such as '110 M' or '70 B'."""
    unit, name = (1e9, " B") if number >= 1e9 else (1e6, " M") if number >= 1e6 else (1, "")
    return f"{number / unit:.3g}{name}"


def sequence(tokens: int) -> str:
    """Return the description of a text sample: '1,024 tokens'."""
    return f"{tokens:,} tokens"


def image(pixels: int) -> str:
    """Return the description of a picture sample: 'an image of 224 x 224'."""
    return f"an image of {pixels} x {pixels}"
