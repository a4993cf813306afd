"""What a model has and computes, counted from a few of its numbers: parameters, operations, and activations to keep.

    forward of a token     2 N + 4 s a L        N: weights that it is multiplied with, the output's included; s tokens
                                                in a sequence; a: width of all heads; L layers
                                                (Kaplan et al. 2020, table 1; Chowdhery et al. 2022, appendix B)
    training               3 x forward          backward multiplies each matrix twice: 6 N (Hoffmann et al. 2022)
    activations of a token L (18 h + 4 f)       bytes in 16 bits; h: width, f: inner width, or 8 f where it is gated
                                                (Korthikanti et al. 2022, section 4.1; no matrix of attention is kept)
    convolution            2 k^2 c_in c_out     for each place of its output

Attention is counted in full, also where it looks back alone. A Hugging Face configuration is a file of JSON from which
numbers are read, and nothing else; parameter counts are those that the library's models have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from hetopt.core.errors import BadInput
from hetopt.core.paths import shown

Kind = Literal["transformer", "convolution"]

TOKENS_A_PARAMETER = 20
"""Of a training run that makes the best of its operations (Hoffmann et al. 2022, table 3)."""

WIDTH_OVER_DEPTH = 64
"""Of GPT-2 and BERT, where nothing is known but the number of parameters."""

LARGEST = 10_000_000
"""No number of a configuration is larger: vocabularies end below 300,000."""


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    """A model, counted.

    Attributes:
        name: what it is, in a few words.
        parameters: all of them.
        forward_flops: of one sample, in its forward pass.
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


def of_parameters(parameters: float, tokens: int) -> ModelCount:
    """A transformer of which only the number of parameters is known: ``6 N`` a token, shaped as GPT-2.

    From ``N = 12 L h^2`` and ``h = 64 L``. Embeddings are part of ``N``, the term of attention is left out.
    """
    width = (WIDTH_OVER_DEPTH * parameters / 12) ** (1 / 3)
    layers = max(1, round(width / WIDTH_OVER_DEPTH))
    return ModelCount(
        name=f"{_short(parameters)} parameters",
        kind="transformer",
        parameters=math.ceil(parameters),
        forward_flops=2 * parameters * tokens,
        activation_bytes=34.0 * width * layers * tokens,
        layers=layers,
        sample=_sequence(tokens),
    )


def of_flops(flops: float) -> float:
    """Parameters of a transformer that makes the best of so many operations: ``C = 6 N D``, ``D = 20 N``."""
    return math.sqrt(flops / (6 * TOKENS_A_PARAMETER))


def of_config(config: Mapping[str, Any], tokens: int | None) -> ModelCount:
    """A model by its Hugging Face configuration.

    Args:
        config: the file's fields.
        tokens: in a sample, of a model of language. Absent: as many as it has places for, at most 1,024.

    Raises:
        BadInput: a kind of model that is not counted, or fields that are missing or impossible, all of them named.
    """
    _check_trainable(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        said = shown(name) if isinstance(name, str) else "missing"
        if any("expert" in field for field in config):
            said += ", a mixture of experts that is not counted"
        raise BadInput(
            f"model_type is {said}; parameters are counted for {', '.join(sorted(FAMILIES))}.",
            hint="give the number of parameters with `params`",
        )
    fields = Fields(values=config, wrong=[])
    counted = FAMILIES[name](fields, tokens)
    fields.refuse()
    return counted


def _check_trainable(config: Mapping[str, Any]) -> None:
    """Refuse a file whose weights are not trained as a whole model is.

    Raises:
        BadInput: it is of an adapter, of quantised weights, or of several models.
    """
    if "peft_type" in config or "base_model_name_or_path" in config:
        base = config.get("base_model_name_or_path")
        raise BadInput(
            f"this configures an adapter ({shown(str(config.get('peft_type')))}), and no model.",
            hint=f"give the config.json of its base_model_name_or_path, {shown(str(base))}: all of it is then trained",
        )
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        bits = f"{quantized['bits']} bits" if isinstance(quantized.get("bits"), int) else "few bits"
        method = shown(str(quantized.get("quant_method")))
        raise BadInput(
            f"the weights are quantised ({method}, {bits}), and such weights are not trained whole.",
            hint="give the config.json of the model before it was quantised",
        )
    if isinstance(config.get("text_config"), Mapping):
        raise BadInput(
            "this configures several models in one (text_config and others).",
            hint="save `text_config` as a file of its own, or give the number of parameters with `params`",
        )


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Numbers of a configuration; what is wrong with them is told together."""

    values: Mapping[str, Any]
    wrong: list[str]

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of the names that is there, a whole number."""
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
        """Whole numbers, one a stage."""
        value = self.values.get(name, list(default))
        if (
            isinstance(value, list)
            and 0 < len(value) <= 64
            and all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= LARGEST for one in value)
        ):
            return tuple(value)
        self.wrong.append(f"{name} must be a list of whole numbers")
        return default

    def ratio(self, name: str, default: float) -> float:
        """A number above 0, at most 64: of one width to another."""
        value = self.values.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 64:
            return float(value)
        self.wrong.append(f"{name} must be a number above 0, at most 64")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """Yes or no."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    @property
    def labels(self) -> int:
        """Classes that are told apart; two where nothing is said, as in the library."""
        named = self.values.get("id2label")
        return min(len(named), LARGEST) if isinstance(named, dict) and named else self.whole("num_labels", default=2)

    def refuse(self) -> None:
        """Say all that was wrong.

        Raises:
            BadInput: something was.
        """
        if self.wrong:
            raise BadInput(
                f"The configuration cannot be counted: {'; '.join(dict.fromkeys(self.wrong))}.",
                hint="correct it, or give the number of parameters with `params`",
            )


def _short(number: float) -> str:
    """Such as '110 M', or '70 B'."""
    unit, name = (1e9, " B") if number >= 1e9 else (1e6, " M") if number >= 1e6 else (1, "")
    return f"{number / unit:.3g}{name}"


def _sequence(tokens: int) -> str:
    return f"{tokens:,} tokens"


def _linear(rows: int, columns: int) -> int:
    return (rows + 1) * columns


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of a transformer, all alike.

    Attributes:
        heads: width of all heads together; ``keys``: of all keys, less where heads share them.
        inner: width between a layer's two matrices, or three where it is gated.
        parameters: of one layer; ``weights``: those that a token is multiplied with.
    """

    count: int
    width: int
    heads: int
    inner: int
    gated: bool
    parameters: int
    weights: int

    def sample(self, name: str, parameters: int, head: int, tokens: int, vocabulary: int = 0) -> ModelCount:
        """A sample of so many tokens, with the ``head`` weights of its output."""
        weights = self.count * self.weights + head
        activations = self.count * (18 * self.width + (8 if self.gated else 4) * self.inner) + 6 * vocabulary
        return ModelCount(
            name=name,
            kind="transformer",
            parameters=parameters,
            forward_flops=tokens * (2.0 * weights + 4.0 * tokens * self.heads * self.count),
            activation_bytes=float(tokens * activations),
            layers=self.count,
            sample=_sequence(tokens),
        )


def _plain_layers(count: int, width: int, inner: int, *, norms: int = 2) -> Layers:
    """Four square matrices and two of the inner width, all with biases, and layer norms."""
    matrices = 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    return Layers(
        count=count,
        width=width,
        heads=width,
        inner=inner,
        gated=False,
        parameters=matrices + norms * 2 * width,
        weights=4 * width * width + 2 * width * inner,
    )


MOST_TOKENS = 1024


def _tokens(given: int | None, places: int) -> int:
    return given or min(places, MOST_TOKENS)


def _gpt2(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("n_embd", "hidden_size"), fields.whole("n_layer", "num_hidden_layers")
    vocabulary, places = fields.whole("vocab_size"), fields.whole("n_positions", "n_ctx", default=1024)
    body = _plain_layers(layers, width, fields.whole("n_inner", default=4 * width))
    parameters = (vocabulary + places) * width + layers * body.parameters + 2 * width
    return body.sample("gpt2", parameters, vocabulary * width, _tokens(tokens, places), vocabulary)


def _gpt_neox(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    vocabulary = fields.whole("vocab_size")
    body = _plain_layers(layers, width, fields.whole("intermediate_size"))
    copies = 1 if fields.flag("tie_word_embeddings", default=False) else 2
    parameters = copies * vocabulary * width + layers * body.parameters + 2 * width
    places = fields.whole("max_position_embeddings", default=2048)
    return body.sample("gpt_neox", parameters, vocabulary * width, _tokens(tokens, places), vocabulary)


def _opt(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    vocabulary, places = fields.whole("vocab_size"), fields.whole("max_position_embeddings", default=2048)
    words = fields.whole("word_embed_proj_dim", default=width)
    body = _plain_layers(layers, width, fields.whole("ffn_dim"))
    parameters = vocabulary * words + (places + 2) * width + layers * body.parameters
    parameters += 2 * width if fields.flag("do_layer_norm_before", default=True) else 0
    parameters += 2 * words * width if words != width else 0
    return body.sample("opt", parameters, vocabulary * words, _tokens(tokens, places), vocabulary)


def _bloom(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("hidden_size", "n_embed"), fields.whole("n_layer", "num_hidden_layers")
    vocabulary = fields.whole("vocab_size")
    body = _plain_layers(layers, width, 4 * width)
    parameters = vocabulary * width + layers * body.parameters + 4 * width
    places = fields.whole("seq_length", default=2048)
    return body.sample("bloom", parameters, vocabulary * width, _tokens(tokens, places), vocabulary)


def _phi(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    vocabulary = fields.whole("vocab_size")
    body = _plain_layers(layers, width, fields.whole("intermediate_size", default=4 * width), norms=1)
    parameters = vocabulary * width + layers * body.parameters + 2 * width + _linear(width, vocabulary)
    places = fields.whole("max_position_embeddings", default=2048)
    return body.sample("phi", parameters, vocabulary * width, _tokens(tokens, places), vocabulary)


@dataclass(frozen=True, kw_only=True)
class Gated:
    """How one family of gated decoders differs from Llama.

    Attributes:
        query_bias: biases of queries, keys and values.
        norms: of a layer, each of one vector.
        head_norms: of queries and keys, within a head.
        tied: whether the output is the embedding, where the file does not say.
    """

    name: str
    query_bias: bool = False
    norms: int = 2
    head_norms: bool = False
    tied: bool = False

    def __call__(self, fields: Fields, tokens: int | None) -> ModelCount:
        """See `of_config`."""
        width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
        vocabulary, inner = fields.whole("vocab_size"), fields.whole("intermediate_size")
        heads = fields.whole("num_attention_heads")
        each = fields.whole("head_dim", default=max(1, width // heads))
        query, key = heads * each, fields.whole("num_key_value_heads", default=heads) * each
        bias = fields.flag("attention_bias", default=False)
        experts = fields.whole("num_local_experts", "num_experts", default=1)
        chosen = min(experts, fields.whole("num_experts_per_tok", default=1))
        inner = fields.whole("moe_intermediate_size", default=inner) if experts > 1 else inner
        shared_inner = fields.whole("shared_expert_intermediate_size", default=0, least=0)
        always = (3 * shared_inner + 1) * width if shared_inner else 0  # the expert of every token, and its gate
        router = width * experts if experts > 1 else 0
        attention = 2 * width * query + 2 * width * key
        biases = (query + 2 * key if bias or self.query_bias else 0) + (width if bias else 0)
        own = biases + self.norms * width + (2 * each if self.head_norms else 0)
        body = Layers(
            count=layers,
            width=width,
            heads=query,
            inner=chosen * inner + shared_inner,
            gated=True,
            parameters=attention + own + router + 3 * experts * width * inner + always,
            weights=attention + router + 3 * chosen * width * inner + always,
        )
        copies = 1 if fields.flag("tie_word_embeddings", default=self.tied) else 2
        parameters = copies * vocabulary * width + layers * body.parameters + width
        places = fields.whole("max_position_embeddings", default=2048)
        return body.sample(self.name, parameters, vocabulary * width, _tokens(tokens, places), vocabulary)


def _falcon(fields: Fields, tokens: int | None) -> ModelCount:
    """Almazrouei et al. 2023: attention beside the inner matrices, and keys that all heads share, or groups of them."""
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers", "n_layer")
    vocabulary, heads = fields.whole("vocab_size"), fields.whole("num_attention_heads", "n_head")
    inner, bias = fields.whole("ffn_hidden_size", default=4 * width), fields.flag("bias", default=False)
    grouped, parallel = (
        fields.flag("new_decoder_architecture", default=False),
        fields.flag("parallel_attn", default=True),
    )
    shared = fields.flag("multi_query", default=True)
    keys = fields.whole("num_kv_heads", "n_head_kv", default=heads) if grouped else 1 if shared else heads
    both = width + 2 * keys * max(1, width // heads)
    norms = fields.whole("num_ln_in_parallel_attn", default=2) if grouped else 1 if parallel else 2
    weights = width * both + width * width + 2 * width * inner
    body = Layers(
        count=layers,
        width=width,
        heads=width,
        inner=inner,
        gated=False,
        parameters=weights + (both + 2 * width + inner if bias else 0) + norms * 2 * width,
        weights=weights,
    )
    copies = 1 if fields.flag("tie_word_embeddings", default=True) else 2
    parameters = copies * vocabulary * width + layers * body.parameters + 2 * width
    places = fields.whole("max_position_embeddings", default=2048)
    return body.sample("falcon", parameters, vocabulary * width, _tokens(tokens, places), vocabulary)


def _t5(fields: Fields, tokens: int | None) -> ModelCount:
    """Raffel et al. 2020; its gated form, untied, is that of mT5 and FLAN-T5. As many tokens come out as go in.

    A decoder's layer attends twice: to what came out before, and to what went in.
    """
    width, inner = fields.whole("d_model", default=512), fields.whole("d_ff", default=2048)
    heads = fields.whole("num_heads", default=8)
    all_heads, vocabulary = heads * fields.whole("d_kv", default=64), fields.whole("vocab_size")
    encoder = fields.whole("num_layers", default=6)
    decoder = fields.whole("num_decoder_layers", default=encoder)
    gated = str(fields.values.get("feed_forward_proj", "relu")).startswith("gated")
    attention, matrices = 4 * width * all_heads, (3 if gated else 2) * width * inner
    weights = encoder * (attention + matrices) + decoder * (2 * attention + matrices)
    biases = 2 * heads * fields.whole("relative_attention_num_buckets", default=32)
    copies = 1 if fields.flag("tie_word_embeddings", default=True) else 2
    each = _tokens(tokens, fields.whole("n_positions", default=512))
    attentions = encoder + 2 * decoder
    kept = 10 * width + (8 if gated else 4) * inner
    return ModelCount(
        name="t5",
        kind="transformer",
        parameters=copies * vocabulary * width + weights + (2 * encoder + 3 * decoder + 2) * width + biases,
        forward_flops=each * (2.0 * (weights + vocabulary * width) + 4.0 * each * all_heads * attentions),
        activation_bytes=float(
            each * ((encoder + decoder) * kept + decoder * 5 * width + attentions * 8 * all_heads + 6 * vocabulary)
        ),
        layers=encoder + decoder,
        sample=f"{each:,} tokens in and as many out",
    )


def _bert(fields: Fields, tokens: int | None) -> ModelCount:
    """BERT, and RoBERTa, which differs in numbers alone; without the head of a task."""
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    places = fields.whole("max_position_embeddings", default=512)
    words = fields.whole("vocab_size") + places + fields.whole("type_vocab_size", default=2)
    body = _plain_layers(layers, width, fields.whole("intermediate_size"))
    parameters = words * width + 2 * width + layers * body.parameters + _linear(width, width)
    return body.sample("bert", parameters, 0, _tokens(tokens, places))


def _electra(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    places, narrow = fields.whole("max_position_embeddings", default=512), fields.whole("embedding_size")
    words = fields.whole("vocab_size") + places + fields.whole("type_vocab_size", default=2)
    body = _plain_layers(layers, width, fields.whole("intermediate_size"))
    parameters = words * narrow + 2 * narrow + layers * body.parameters
    parameters += _linear(narrow, width) if narrow != width else 0
    return body.sample("electra", parameters, 0, _tokens(tokens, places))


def _albert(fields: Fields, tokens: int | None) -> ModelCount:
    """Layers of a group have the same parameters."""
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    places, narrow = fields.whole("max_position_embeddings", default=512), fields.whole("embedding_size")
    words = fields.whole("vocab_size") + places + fields.whole("type_vocab_size", default=2)
    body = _plain_layers(layers, width, fields.whole("intermediate_size"))
    groups = fields.whole("num_hidden_groups", default=1) * fields.whole("inner_group_num", default=1)
    parameters = words * narrow + 2 * narrow + _linear(narrow, width) + groups * body.parameters + _linear(width, width)
    return body.sample("albert", parameters, 0, _tokens(tokens, places))


def _distilbert(fields: Fields, tokens: int | None) -> ModelCount:
    width, layers = fields.whole("dim"), fields.whole("n_layers")
    places = fields.whole("max_position_embeddings", default=512)
    body = _plain_layers(layers, width, fields.whole("hidden_dim"))
    parameters = (fields.whole("vocab_size") + places) * width + 2 * width + layers * body.parameters
    return body.sample("distilbert", parameters, 0, _tokens(tokens, places))


def _image(pixels: int) -> str:
    return f"an image of {pixels} x {pixels}"


def _vit(fields: Fields, _: int | None) -> ModelCount:
    """Patches and one token for the class; with the head that tells classes apart."""
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    pixels, patch = fields.whole("image_size", default=224), fields.whole("patch_size", default=16)
    patches = max(1, pixels // patch) ** 2
    colours = fields.whole("num_channels", default=3)
    body = _plain_layers(layers, width, fields.whole("intermediate_size"))
    embedding = _linear(colours * patch * patch, width)
    parameters = embedding + (patches + 2) * width + layers * body.parameters + 2 * width
    counted = body.sample("vit", parameters + _linear(width, fields.labels), embedding, patches + 1)
    return replace(counted, sample=_image(pixels))


def _swin(fields: Fields, _: int | None) -> ModelCount:
    """Liu et al. 2021: attention within windows, and stages of half the side and twice the width."""
    pixels, patch = fields.whole("image_size", default=224), fields.whole("patch_size", default=4)
    colours, width = fields.whole("num_channels", default=3), fields.whole("embed_dim", default=96)
    depths = fields.wholes("depths", (2, 2, 6, 2))
    heads, window = fields.wholes("num_heads", (3, 6, 12, 24)), fields.whole("window_size", default=7)
    ratio, biased = fields.ratio("mlp_ratio", 4.0), fields.flag("qkv_bias", default=True)
    side, embedding = math.ceil(pixels / patch), _linear(colours * patch * patch, width)
    parameters, flops, kept = embedding + 2 * width, 2.0 * embedding * side * side, 0.0
    for stage, (depth, many) in enumerate(zip(depths, heads, strict=False)):
        if stage > 0:  # four neighbours become one of twice the width
            side, width = math.ceil(side / 2), 2 * width
            parameters += 4 * width + 2 * width * width
            flops += 2.0 * 2 * width * width * side * side
        inner = int(ratio * width)
        weights = 4 * width * width + 2 * width * inner
        biases = (3 * width if biased else 0) + 2 * width + inner
        parameters += depth * (weights + biases + 4 * width + (2 * window - 1) ** 2 * many)
        flops += depth * side * side * (2.0 * weights + 4.0 * window * window * width)
        kept += depth * side * side * (18.0 * width + 4 * inner)
    head = _linear(width, fields.labels)
    return ModelCount(
        name="swin",
        kind="transformer",
        parameters=parameters + 2 * width + head,
        forward_flops=flops + 2.0 * head,
        activation_bytes=kept,
        layers=sum(depths),
        sample=_image(pixels),
    )


@dataclass
class Convolutions:
    """Counts convolutions one behind the other.

    Attributes:
        pixels: of a side of the image as it is by now.
        parameters, forward_flops, outputs, layers: so far; ``outputs``: elements that convolutions gave.
    """

    pixels: float
    parameters: int = 0
    forward_flops: float = 0.0
    outputs: float = 0.0
    layers: int = 0

    def add(
        self,
        inputs: int,
        outputs: int,
        side: int,
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
        norm: int = 2,
    ) -> None:
        """A convolution of ``side`` by ``side``, with ``norm`` more parameters a channel of its output."""
        self.pixels = math.ceil(self.pixels / stride)
        self._count(inputs, outputs, side, groups=groups, bias=bias, norm=norm)

    def beside(self, inputs: int, outputs: int) -> None:
        """The way round a block, of one by one, with its norm."""
        self._count(inputs, outputs, 1)

    def _count(
        self, inputs: int, outputs: int, side: int, *, groups: int = 1, bias: bool = False, norm: int = 2
    ) -> None:
        weights = side * side * inputs * outputs // groups
        places = self.pixels * self.pixels
        self.parameters += weights + (outputs if bias else 0) + norm * outputs
        self.forward_flops += 2.0 * weights * places
        self.outputs += outputs * places
        self.layers += 1

    def count(self, name: str, pixels: int, head: int) -> ModelCount:
        """With the head; of each convolution its output is kept, and once more behind the norm, in 16 bits."""
        return ModelCount(
            name=name,
            kind="convolution",
            parameters=self.parameters + head,
            forward_flops=self.forward_flops + 2.0 * head,
            activation_bytes=4.0 * self.outputs,
            layers=self.layers + 1,
            sample=_image(pixels),
        )


def _resnet(fields: Fields, _: int | None) -> ModelCount:
    """He et al. 2016, with the stride in the convolution of three by three."""
    pixels = fields.whole("image_size", default=224)
    inputs = fields.whole("embedding_size", default=64)
    sizes, depths = fields.wholes("hidden_sizes", (256, 512, 1024, 2048)), fields.wholes("depths", (3, 4, 6, 3))
    bottleneck = fields.values.get("layer_type", "bottleneck") == "bottleneck"
    net = Convolutions(pixels=pixels)
    net.add(fields.whole("num_channels", default=3), inputs, 7, stride=2)
    net.pixels = math.ceil(net.pixels / 2)
    for stage, (outputs, depth) in enumerate(zip(sizes, depths, strict=False)):
        halves = stage > 0 or fields.flag("downsample_in_first_stage", default=False)
        for layer in range(min(depth, 1000)):
            stride = 2 if halves and layer == 0 else 1
            if bottleneck:
                narrow = max(1, outputs // 4)
                net.add(inputs, narrow, 1)
                net.add(narrow, narrow, 3, stride=stride)
                net.add(narrow, outputs, 1)
            else:
                net.add(inputs, outputs, 3, stride=stride)
                net.add(outputs, outputs, 3)
            if inputs != outputs or stride > 1:
                net.beside(inputs, outputs)
            inputs = outputs
    return net.count("resnet", pixels, _linear(inputs, fields.labels))


def _convnext(fields: Fields, _: int | None) -> ModelCount:
    """Liu et al. 2022."""
    pixels, patch = fields.whole("image_size", default=224), fields.whole("patch_size", default=4)
    sizes, depths = fields.wholes("hidden_sizes", (96, 192, 384, 768)), fields.wholes("depths", (3, 3, 9, 3))
    net = Convolutions(pixels=pixels)
    inputs = fields.whole("num_channels", default=3)
    for stage, (width, depth) in enumerate(zip(sizes, depths, strict=False)):
        # The first norm follows its convolution, later ones go before: twice the channels that they see.
        net.add(inputs, width, patch if stage == 0 else 2, stride=patch if stage == 0 else 2, bias=True, norm=0)
        net.parameters += 2 * (width if stage == 0 else inputs)
        for _layer in range(min(depth, 1000)):
            net.add(width, width, 7, groups=width, bias=True)
            net.add(width, 4 * width, 1, bias=True, norm=0)
            net.add(4 * width, width, 1, bias=True, norm=1)
        inputs = width
    net.parameters += 2 * inputs
    return net.count("convnext", pixels, _linear(inputs, fields.labels))


FAMILIES: Mapping[str, Callable[[Fields, int | None], ModelCount]] = MappingProxyType(
    {
        "albert": _albert,
        "bert": _bert,
        "bloom": _bloom,
        "convnext": _convnext,
        "distilbert": _distilbert,
        "electra": _electra,
        "falcon": _falcon,
        "gemma": Gated(name="gemma", tied=True),
        "gemma2": Gated(name="gemma2", norms=4, tied=True),
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "llama": Gated(name="llama"),
        "mistral": Gated(name="mistral"),
        "mixtral": Gated(name="mixtral"),
        "mt5": _t5,
        "opt": _opt,
        "phi": _phi,
        "phi3": Gated(name="phi3"),
        "qwen2": Gated(name="qwen2", query_bias=True),
        "qwen2_moe": Gated(name="qwen2_moe", query_bias=True),
        "qwen3": Gated(name="qwen3", head_norms=True),
        "qwen3_moe": Gated(name="qwen3_moe", head_norms=True),
        "resnet": _resnet,
        "roberta": _bert,
        "swin": _swin,
        "t5": _t5,
        "vit": _vit,
        "xlm-roberta": _bert,
    }
)
"""By ``model_type``."""
