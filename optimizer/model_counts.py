"""Counts of a model from a few of its dimensions: parameters, floating-point operations, bytes in memory.

    forward of a token     2 N + 4 s a L        N: weights that it is multiplied with, the output's included; s tokens
                                                in a sequence; a: width of all heads; L layers
                                                (Kaplan et al. 2020, table 1; Chowdhery et al. 2022, appendix B)
    training               3 x forward          backward multiplies each matrix twice, for the gradient of its input and
                                                for its own: 6 N (Hoffmann et al. 2022)
                           (2 + t) x forward    where a share t is trained, as an adapter beside frozen weights: frozen
                                                matrices need no gradient of their own (Hu et al. 2022)
    activations of a token L (18 h + 4 f)       bytes in 16 bits; h: width, f: inner width, or 8 f where it is gated
                                                (Korthikanti et al. 2022, section 4.1; no matrix of attention is kept)
    convolution            2 k^2 c_in c_out     for each place of its output
    trained parameter      4 + 4 + o            bytes of itself, its gradient, and the optimizer's state, all in fp32
    frozen parameter       2 or 0.5             bytes in 16 bits or in 4 (NF4 and its scales, Dettmers et al. 2023)

Attention is counted in full, causal attention too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from hetopt.core.errors import BadInput
from hetopt.core.memory import StepMemory, TrainingMemory

Kind = Literal["transformer", "convolution"]

LOGIT_BYTES = 6
"""Bytes kept of each entry of a language model's output: itself in 16 bits, and its logarithm in single precision."""

TOKENS_A_PARAMETER = 20
"""Tokens a parameter of a training run that makes the best of its operations (Hoffmann et al. 2022, table 3)."""

WIDTH_OVER_DEPTH = 64
"""Ratio of width to layers, of GPT-2 and BERT, that is taken where nothing is known but the number of parameters."""

LARGEST = 10_000_000
"""Largest number that a configuration may have: vocabularies end below 300,000."""


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    """Counts of a model, not measured: parameters, and FLOPs and activation bytes of a sample.

    Attributes:
        name: name of the model, in a few words.
        parameters: number of all parameters.
        forward_flops: operations of one sample's forward pass.
        attention_flops: part of ``forward_flops`` in products of queries, keys and values.
        logits: entries of one sample's output over all its tokens; each takes `LOGIT_BYTES` of the activations.
        score_bytes: bytes of one sample's attention scores where attention is not fused, as in published code of
            encoders; memory is counted without them.
        activation_bytes: bytes of one sample kept for the backward pass in 16 bits.
        layers: number of layers, one behind the other.
        sample: what one sample is, in words.
        kind: transformer or convolution.
    """

    name: str
    kind: Kind
    parameters: int
    forward_flops: float
    activation_bytes: float
    layers: int
    sample: str
    attention_flops: float = 0.0
    logits: float = 0.0
    score_bytes: float = 0.0

    @property
    def in_words(self) -> str:
        """The name with the number of parameters: 'llama, 8.03 B parameters'."""
        counted = f"{_short(self.parameters)} parameters"
        return self.name if self.name == counted else f"{self.name}, {counted}"


def of_parameters(parameters: float, tokens: int) -> ModelCount:
    """Return the counts of a transformer of ``parameters`` weights, shaped as GPT-2, for samples of ``tokens`` tokens.

    Operations of a token are ``2 N + 4 s h L``, from ``N = 12 L h^2`` and ``h = 64 L``. Embeddings are part of ``N``.
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
    """Return the compute-optimal number of parameters of a training of ``flops`` operations in all (Hoffmann 2022).

    From ``C = 6 N D`` with ``D = 20 N`` tokens; not rounded.
    """
    return math.sqrt(flops / (6 * TOKENS_A_PARAMETER))


ACTIVE_ALONE = "give what a token passes with `params`, which leaves the memory of the other experts out"
"""End of hints on a mixture of experts that is not counted."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Fields of a model's JSON configuration, read with checks that collect all faults in ``wrong``.

    Attributes:
        values: the configuration.
        wrong: a phrase for each fault that was found so far; `refuse` raises them.
    """

    values: Mapping[str, Any]
    wrong: list[str]

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first present field of ``names``, a whole number; a fault is noted, and ``least`` returned.

        Args:
            *names: fields of one meaning, of which a configuration has one.
            default: returned if none is present or all are null; None: that is a fault.
            least: smallest number that is no fault; the largest is `LARGEST`.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST:
                return value
            self.wrong.append(f"{name} must be a whole number from {least} to {LARGEST:,}, got {repr(value)[:40]}")
            return least or 1
        if default is None:
            self.wrong.append(f"{names[0]} is missing")
            return 1
        return default

    def wholes(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return a field's list of whole numbers; ``default`` where it is absent, or at fault, which is noted.

        A fault is anything but a list of 1 to 64 numbers from 1 to `LARGEST`.
        """
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
        """Return ``count`` whole numbers from a field that lists them, or has one for all; faults are noted.

        ``default`` stands for each number that is missing or at fault.
        """
        if not isinstance(self.values.get(name), list):
            return (self.whole(name, default=default),) * count
        numbers = self.wholes(name, (default,) * count)
        if len(numbers) != count:
            self.wrong.append(f"{name} must have {count} numbers")
        return (*numbers, *(default,) * count)[:count]

    def stages(self, **defaults: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the whole numbers of each stage of a network from fields that list one for each; faults are noted.

        Args:
            **defaults: name of each field, and its list where it is absent or at fault.

        Returns:
            A tuple for each stage, with a number of each field in the order of ``defaults``.
        """
        listed = {name: self.wholes(name, default) for name, default in defaults.items()}
        if len(set(map(len, listed.values()))) > 1:
            self.wrong.append(f"{' and '.join(listed)} must list as many numbers")
        return list(zip(*listed.values(), strict=False))

    def patches(self, side: str, pixels: int, *, default: int) -> tuple[int, int]:
        """Return a patch's side in pixels, and the number of patches along a picture's side; faults are noted.

        Args:
            side: name of the field that has the picture's side, for messages.
            pixels: the picture's side.
            default: the patch's side if the configuration does not give one.
        """
        patch = self.whole("patch_size", default=default)
        if patch > pixels:
            self.wrong.append(f"patch_size must be at most {side}, {pixels}, got {patch}")
        return patch, max(1, pixels // patch)

    def texts(self, name: str, count: int, *, default: str) -> tuple[str, ...]:
        """Return a field's list of ``count`` strings; ``default`` repeated if it is absent, or at fault (noted)."""
        value = self.values.get(name, [default] * count)
        if isinstance(value, list) and len(value) == count and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        self.wrong.append(f"{name} must be a list of {count} names")
        return (default,) * count

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a field that is true or false; ``default`` where it is absent or anything else, which is not noted."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    @property
    def labels(self) -> int:
        """The number of classes of a classifier: of ``id2label``, else ``num_labels``, else 2, as in the library."""
        named = self.values.get("id2label")
        return min(len(named), LARGEST) if isinstance(named, dict) and named else self.whole("num_labels", default=2)

    def refuse(self) -> None:
        """Raise an error that names all faults noted so far; do nothing if there are none.

        Raises:
            BadInput: at least one fault was noted.
        """
        if self.wrong:
            mixes = any("expert" in fault for fault in self.wrong)
            raise BadInput(
                f"The configuration cannot be counted: {'; '.join(dict.fromkeys(self.wrong))}.",
                hint=f"correct it, or {ACTIVE_ALONE if mixes else 'give the number of parameters with `params`'}",
            )


def _short(number: float) -> str:
    """Return a number in short, such as '98.2 k', '110 M' or '70 B'."""
    unit, name = next(((unit, name) for unit, name in _UNITS.items() if number >= unit), (1.0, ""))
    return f"{number / unit:.3g}{name}"


_UNITS = {1e9: " B", 1e6: " M", 1e3: " k"}


def sequence(tokens: int) -> str:
    """Return how a text sample of ``tokens`` tokens is described, such as '1,024 tokens'."""
    return f"{tokens:,} tokens"


def image(pixels: int) -> str:
    """Return how a picture of ``pixels`` to a side is described, such as 'an image of 224 x 224'."""
    return f"an image of {pixels} x {pixels}"


Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw8bit", "muon", "sgd", "adafactor"]

CONTRIBUTION = 3.0
"""Operations of a step over those of its forward pass, where all of a model is trained."""

MASTER_BYTES = 4
HALF_BYTES = 2
"""Bytes of the 16-bit copy of a trained parameter that is multiplied with, beside itself and its gradient in single
precision (Rajbhandari et al. 2020, section 3.1)."""

STATE_BYTES: Mapping[Optimizer, int] = MappingProxyType(
    {"adamw": 8, "adamw8bit": 2, "muon": 4, "sgd": 4, "adafactor": 0}
)
"""Bytes of an optimizer's state of a trained parameter: two moments, two in 8 bits (Dettmers et al. 2022), one
momentum; Adafactor keeps rows and columns alone."""

FROZEN_BYTES: Mapping[Method, float] = MappingProxyType({"full": 0.0, "lora": 2.0, "qlora": 0.516})
"""Bytes of a frozen parameter, by method: NF4 takes 4.127 bits with its doubly quantised scales (Dettmers et al. 2023,
section 3)."""

ADAPTER_SHARE = 0.01
"""Part of the parameters that is in the adapters of every linear layer: rank 16 is 0.6 % of 7 billion, and 1 % of 1
billion."""

DEQUANTISING = 1.39
"""Factor on the time of a step with weights in 4 bits over one in 16 (Raschka 2023, "Finetuning LLMs with LoRA and
QLoRA: insights from hundreds of experiments": 39 % for 33 % less memory)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Way to train a model: all weights or an adapter beside frozen ones, and the optimizer.

    Attributes:
        method: "full": all weights; "lora": an adapter beside weights in 16 bits; "qlora": beside weights in 4 bits.
        trained: share of the parameters that is trained, (0, 1].
        optimizer: optimizer whose state is kept of each trained parameter.
    """

    method: Method = "full"
    trained: float = 1.0
    optimizer: Optimizer = "adamw"

    @property
    def passes(self) -> float:
        """Operations of a step over those of its forward pass: 3 if all is trained, else 2 plus the trained share."""
        return CONTRIBUTION - 1 + self.trained

    @property
    def slowdown(self) -> float:
        """Factor on the time of the operations: 1.39 with weights in 4 bits, else 1."""
        return DEQUANTISING if self.method == "qlora" else 1.0

    def trained_parameters(self, parameters: int) -> int:
        """Return how many of ``parameters`` parameters are trained and so have gradients, at least 1."""
        return max(1, round(self.trained * parameters))

    def weight_bytes(self, parameters: int, *, half: bool) -> float:
        """Return the bytes of a replica's weights as products read them; ``half``: 16-bit copies, else fp32.

        Frozen weights have the bytes of the method.
        """
        each = HALF_BYTES if half else MASTER_BYTES
        return self.trained * parameters * each + self._frozen_bytes(parameters)

    def memory(self, model: ModelCount, batch_size: int, *, half: bool) -> TrainingMemory:
        """Return the bytes of a replica in training: kept between steps, and taken by steps of up to ``batch_size``.

        Activations of every layer are kept. Steps are counted for one sample and for ``batch_size``, at least 2.

        Args:
            model: counts of the model.
            batch_size: largest number of samples of a step.
            half: whether matrices are multiplied in 16 bits; False: in fp32.
        """
        trained = self.trained_parameters(model.parameters)
        copied_bytes = HALF_BYTES * trained if half else 0
        sample_bytes = model.activation_bytes * (1 if half else 2)
        return TrainingMemory(
            parameter_bytes=round(MASTER_BYTES * trained + self._frozen_bytes(model.parameters)),
            buffer_bytes=0,
            gradient_bytes=MASTER_BYTES * trained,
            optimizer_bytes=STATE_BYTES[self.optimizer] * trained,
            steps=tuple(
                StepMemory(
                    samples=size, computing_bytes=max(1, round(copied_bytes + sample_bytes * size)), updating_bytes=0
                )
                for size in sorted({1, max(2, batch_size)})
            ),
        )

    def _frozen_bytes(self, parameters: int) -> float:
        return (1 - self.trained) * parameters * FROZEN_BYTES[self.method]


FULL = Recipe()
