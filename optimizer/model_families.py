"""Counts of models from their Hugging Face configurations: transformers, convolutional and diffusion networks.

A configuration is a file of JSON from which numbers are read, and nothing else; parameter counts are within a hundredth
of those that the libraries' models have.

Diffusion networks are those of the library diffusers. UNet: residual blocks of two convolutions on each level,
attention to the picture and to the prompt on some (Rombach et al. 2022, appendix E). DiT: a transformer over patches
whose norms are driven by the time (Peebles and Xie 2023). A sample is one latent picture at one moment; the autoencoder
and the prompt's encoder are not trained, and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hetopt.core.errors import BadInput
from hetopt.core.paths import shown
from hetopt.optimizer.model_counts import ACTIVE_ALONE, LOGIT_BYTES, Fields, Kind, ModelCount, image, sequence

PROMPT_TOKENS = 77
"""Tokens of a prompt as CLIP's text encoder reads it, for diffusion models."""


@dataclass(kw_only=True)
class _Parts:
    """Running totals of a network's parameters, operations and activations."""

    parameters: int = 0
    flops: float = 0.0
    attention_flops: float = 0.0
    activation_bytes: float = 0.0
    layers: int = 0

    def matrix(self, rows: int, columns: int, *, times: int, bias: bool = True, kept: int = 2) -> None:
        """Add a layer with a weight matrix, [rows, columns], that multiplies ``times`` vectors of a sample.

        Args:
            rows: entries of a vector.
            columns: entries of an output.
            times: number of vectors.
            bias: whether there is a parameter more for each column.
            kept: bytes of each entry of the output that are kept for backward.
        """
        self.parameters += rows * columns + columns * bias
        self.flops += 2.0 * rows * columns * times
        self.activation_bytes += kept * columns * times
        self.layers += 1

    def block(self, inputs: int, outputs: int, time: int, places: int) -> None:
        """Add a residual block of a UNet: two convolutions of three by three, norms, and a projection of the time.

        Before each convolution three copies of its input are kept, two bytes an entry each.

        Args:
            inputs: channels of the input.
            outputs: channels of the output.
            time: width of the time's embedding.
            places: pixels of the block's output.
        """
        self.parameters += 2 * inputs + 2 * outputs
        self.activation_bytes += 6.0 * (inputs + outputs) * places
        self.matrix(9 * inputs, outputs, times=places, kept=0)
        self.matrix(time, outputs, times=1)
        self.matrix(9 * outputs, outputs, times=places, kept=0)
        if inputs != outputs:
            self.matrix(inputs, outputs, times=places, kept=0)

    def attention(self, width: int, depth: int, prompt: int, places: int) -> None:
        """Add layers that attend to the picture and to the prompt, each with a gated inner part.

        A layer keeps 57 bytes for each entry of its output, and 6 are kept around all layers, as torch does in 16 bits.

        Args:
            width: channels.
            depth: number of layers.
            prompt: width of the prompt's embedding.
            places: pixels of the picture at this level.
        """
        self.parameters += 2 * width
        for _ in range(2):
            self.matrix(width, width, times=places, kept=3)
        for _ in range(depth):
            self.parameters += 6 * width
            for rows, times in (3 * [(width, places)]) + [(width, places)] + 2 * [(prompt, PROMPT_TOKENS)]:
                self.matrix(rows, width, times=times, bias=False)
            for _ in range(2):
                self.matrix(width, width, times=places, kept=6)
            self.matrix(width, 8 * width, times=places, kept=4)
            self.matrix(4 * width, width, times=places, kept=5)
            self.attention_flops += 4.0 * places * (places + PROMPT_TOKENS) * width

    def counted(self, name: str, sample: str, *, kind: Kind) -> ModelCount:
        """Return the counted parts as a model."""
        return ModelCount(
            name=name,
            kind=kind,
            parameters=self.parameters,
            forward_flops=self.flops + self.attention_flops,
            attention_flops=self.attention_flops,
            activation_bytes=self.activation_bytes,
            layers=self.layers,
            sample=sample,
        )


def unet(fields: Fields, _: int | None) -> ModelCount:
    """Return the counts of Stable Diffusion's UNet (``UNet2DConditionModel``) from the fields of its configuration.

    Faults are noted in ``fields``; the second argument, the tokens of a sample, is not used.
    """
    widths = fields.wholes("block_out_channels", (320, 640, 1280, 1280))
    levels, deep = len(widths), fields.whole("layers_per_block", default=2)
    side, prompt = fields.whole("sample_size", default=64), fields.whole("cross_attention_dim", default=1280)
    depths = fields.each("transformer_layers_per_block", levels, default=1)
    kinds = fields.texts("down_block_types", levels, default="CrossAttnDownBlock2D")
    attends = ["CrossAttn" in kind for kind in kinds]
    if "down_block_types" not in fields.values:
        attends[-1] = False
    parts, first = _Parts(), widths[0]
    time, sides = 4 * first, [max(1, side >> level) for level in range(levels)]
    parts.matrix(first, time, times=1)
    parts.matrix(time, time, times=1)
    added = fields.whole("projection_class_embeddings_input_dim", default=0, least=0)
    if added:
        parts.matrix(added, time, times=1)
        parts.matrix(time, time, times=1)
    parts.matrix(9 * fields.whole("in_channels", default=4), first, times=side * side)
    skips, width = [first], first
    for level, wide in enumerate(widths):
        for _layer in range(deep):
            parts.block(width, wide, time, sides[level] ** 2)
            width = wide
            if attends[level]:
                parts.attention(width, depths[level], prompt, sides[level] ** 2)
            skips.append(width)
        if level < levels - 1:
            parts.matrix(9 * width, width, times=sides[level + 1] ** 2)
            skips.append(width)
    for _block in range(2):
        parts.block(width, width, time, sides[-1] ** 2)
    parts.attention(width, depths[-1], prompt, sides[-1] ** 2)
    for level in reversed(range(levels)):
        for _layer in range(deep + 1):
            parts.block(width + skips.pop(), widths[level], time, sides[level] ** 2)
            width = widths[level]
            if attends[level]:
                parts.attention(width, depths[level], prompt, sides[level] ** 2)
        if level:
            parts.matrix(9 * width, width, times=sides[level - 1] ** 2)
    parts.parameters += 2 * first
    parts.matrix(9 * first, fields.whole("out_channels", default=4), times=side * side)
    return parts.counted("diffusion UNet", image(8 * side), kind="convolution")


def dit(fields: Fields, _: int | None) -> ModelCount:
    """Return the counts of a diffusion transformer (``DiTTransformer2DModel``) from the fields of its configuration.

    Faults are noted in ``fields``; the second argument, the tokens of a sample, is not used.
    """
    heads, each = fields.whole("num_attention_heads", default=16), fields.whole("attention_head_dim", default=72)
    width, count = heads * each, fields.whole("num_layers", default=28)
    side = fields.whole("sample_size", default=32)
    patch, along = fields.patches("sample_size", side, default=2)
    channels = fields.whole("in_channels", default=4)
    outputs = fields.whole("out_channels", default=2 * channels)
    places, classes = along**2, fields.whole("num_embeds_ada_norm", default=1000)
    parts = _Parts(parameters=(classes + 1) * width)
    parts.matrix(channels * patch * patch, width, times=places)
    parts.matrix(256, width, times=1)
    parts.matrix(width, width, times=1)
    for _ in range(count):
        parts.matrix(width, 6 * width, times=1)
        for _matrix in range(4):
            parts.matrix(width, width, times=places, kept=5)
        parts.matrix(width, 4 * width, times=places)
        parts.matrix(4 * width, width, times=places, kept=8)
        parts.attention_flops += 4.0 * places * places * width
    parts.matrix(width, 2 * width, times=1)
    parts.matrix(width, outputs * patch * patch, times=places)
    return parts.counted("diffusion transformer", image(8 * side), kind="transformer")


def of_config(config: Mapping[str, Any], tokens: int | None, *, whole: bool = True) -> ModelCount:
    """Return a model's counts from its Hugging Face config.json; ``tokens`` of a sample, None: as configured.

    Args:
        config: the file's fields.
        tokens: tokens of a sample, for models of language; other models ignore it. None: as many as the model has
            positions for, at most 1,024, or what the family has by default.
        whole: whether all weights are trained; beside an adapter they may stay quantised.

    Raises:
        BadInput: the kind of model is not counted, the file is of an adapter or of several models in one, quantised
            weights are to be trained whole, ``tokens`` exceeds the learned positions, or fields are missing or
            impossible, all of them named.
    """
    _check_trainable(config, whole=whole)
    name = config.get("model_type", config.get("_class_name"))
    if not isinstance(name, str) or name not in FAMILIES:
        kind = shown(name) if isinstance(name, str) else "missing"
        mixes = any("expert" in field for field in config)
        kind += ", a mixture of experts that is not counted" * mixes
        raise BadInput(
            f"model_type is {kind}; parameters are counted for {', '.join(sorted(FAMILIES))}.",
            hint=ACTIVE_ALONE if mixes else "give the number of parameters with `params`",
        )
    fields = Fields(values=config, wrong=[])
    counted = FAMILIES[name](fields, tokens)
    fields.refuse()
    return counted


def _check_trainable(config: Mapping[str, Any], *, whole: bool) -> None:
    """Raise BadInput for a configuration that names no model, or one whose weights cannot be trained as they are.

    Args:
        config: fields of the config.json.
        whole: whether all weights are trained.

    Raises:
        BadInput: the configuration is of an adapter, of quantised weights that are all trained, or of several models.
    """
    if "peft_type" in config or "base_model_name_or_path" in config:
        base = config.get("base_model_name_or_path")
        raise BadInput(
            f"this configures an adapter ({shown(str(config.get('peft_type')))}), and no model.",
            hint=f"give the config.json of its base_model_name_or_path, {shown(str(base))}, and `method='lora'`",
        )
    quantized = config.get("quantization_config")
    if whole and isinstance(quantized, Mapping):
        bits = f"{quantized['bits']} bits" if isinstance(quantized.get("bits"), int) else "few bits"
        method = shown(str(quantized.get("quant_method")))
        raise BadInput(
            f"the weights are quantised ({method}, {bits}), and such weights are not trained whole.",
            hint="`method='qlora'` trains an adapter beside them; or give the config.json of the model before",
        )
    if isinstance(config.get("text_config"), Mapping):
        raise BadInput(
            "this configures several models in one (text_config and others).",
            hint="save `text_config` as a file of its own, or give the number of parameters with `params`",
        )


def _linear(rows: int, columns: int) -> int:
    """Return the parameters of a linear layer with a bias, ``rows`` in and ``columns`` out."""
    return (rows + 1) * columns


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Family of transformers, by its differences from GPT-2; calling it counts a model of the family.

    Numbers have the names that the library gives them.

    Attributes:
        gated: whether layers have three inner matrices, RMS norms and no biases, as Llama has.
        tied: whether the output shares the embedding's weights, unless the configuration has ``tie_word_embeddings``.
        places: whether positions are learned.
        encodes: whether the model has token types and a pooler, as BERT has, and an output over the vocabulary only if
            the configuration has no ``architectures``.
        shares: whether all layers have the same parameters, unless the configuration names groups of layers.
        mixes: required field with the number of experts of each layer; empty: the model is a mixture only if the
            configuration has such a field.
    """

    gated: bool = False
    tied: bool = True
    places: bool = False
    encodes: bool = False
    shares: bool = False
    mixes: str = ""

    def __call__(self, fields: Fields, tokens: int | None) -> ModelCount:
        """Return the counts of a model of this family (see `of_config`).

        Args:
            fields: fields of the configuration, in which faults are noted.
            tokens: tokens of a sample; None: as many as there are positions, at most `MOST_TOKENS`.

        Raises:
            BadInput: there are more tokens than positions that the model has learned.
        """
        vocabulary = fields.whole("vocab_size")
        # Encoders that were saved say what for; one that was not is trained from the start, to find words left out.
        speaks = not self.encodes or "architectures" not in fields.values
        places = fields.whole("max_position_embeddings", "n_positions", "n_ctx", default=512 if self.encodes else 1024)
        body = self.layers(fields)
        copies = 1 if fields.flag("tie_word_embeddings", default=self.tied) else 2
        embedded = copies * vocabulary + (places if self.places else 0)
        if self.encodes:
            embedded += fields.whole("type_vocab_size", default=2, least=0)
        pooler = _linear(body.width, body.width) if self.encodes else 0
        narrow = fields.whole("embedding_size", default=body.width)
        widening = _linear(narrow, body.width) if narrow != body.width else 0
        layers = fields.whole("num_hidden_groups", default=1) if self.shares else body.count
        parameters = embedded * narrow + widening + layers * body.parameters + 2 * body.width + pooler
        head = (vocabulary + body.width * self.encodes) * narrow if speaks else 0
        name = str(fields.values.get("model_type"))
        if self.places and tokens is not None and tokens > places:
            raise BadInput(
                f"`tokens` must be at most {places:,}, the positions that this {name} has learned, got {tokens:,}.",
                hint=f"for example `tokens={places}`",
            )
        return body.sample(
            name,
            parameters,
            head,
            tokens or min(places, MOST_TOKENS),
            vocabulary if speaks else 0,
            fused=not self.encodes,
        )

    def layers(self, fields: Fields) -> Layers:
        """Return the dimensions of a model's layers, all alike, from its configuration; faults are noted.

        Fields that the configuration lacks get the library's defaults. All experts count as parameters, the chosen ones
        alone as work.
        """
        width = fields.whole("hidden_size", "n_embd", "dim", "n_embed")
        inner = fields.whole(
            "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size", default=4 * width
        )
        heads = fields.whole("num_attention_heads", "n_head", "n_heads", default=max(1, width // HEAD_WIDTH))
        each = fields.whole("head_dim", default=max(1, width // heads))
        is_one = fields.flag("multi_query", default=False) and not fields.flag(
            "new_decoder_architecture", default=False
        )
        keys = 1 if is_one else fields.whole("num_key_value_heads", "num_kv_heads", default=heads)
        if heads % keys:
            fields.wrong.append(f"{heads} heads cannot share {keys} of keys and values")
        query, key = heads * each, keys * each
        keys_of_experts, least = (self.mixes,) * bool(self.mixes), None if self.mixes else 1
        experts = fields.whole(*keys_of_experts, "num_local_experts", "num_experts", default=least)
        chosen = fields.whole("num_experts_per_tok", default=least)
        if self.mixes and chosen > experts:
            fields.wrong.append(f"num_experts_per_tok must be at most {self.mixes}, {experts}, got {chosen}")
        chosen = min(experts, chosen)
        inner = fields.whole("moe_intermediate_size", default=inner) if experts > 1 else inner
        shared_inner = fields.whole("shared_expert_intermediate_size", default=0, least=0)
        attention = 2 * width * (query + key) + (width * experts if experts > 1 else 0)
        each_expert = (3 if self.gated else 2) * width * inner
        always = 3 * width * shared_inner  # the expert of every token
        beside = 2 * width if self.gated else 9 * width + inner  # norms and biases
        return Layers(
            count=fields.whole("num_hidden_layers", "n_layer", "n_layers"),
            width=width,
            heads=query,
            number_of_heads=heads,
            inner=chosen * inner + shared_inner,
            gated=self.gated,
            parameters=attention + experts * each_expert + always + beside,
            weights=attention + chosen * each_expert + always,
        )


HEAD_WIDTH = 64
"""Width of an attention head where the configuration does not say: that of GPT-2 and most others."""

MOST_TOKENS = 1024
"""Most tokens of a sample where nobody says how many it has."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Dimensions and weights of the layers of a transformer, all alike.

    Attributes:
        count: number of layers.
        width: width of a token between layers.
        heads: width of all attention heads together.
        number_of_heads: number of attention heads.
        inner: width inside a layer, summed over the experts that a token passes.
        gated: whether the inner matrices are gated.
        parameters: number of parameters of a layer.
        weights: number of a layer's weights that each token is multiplied with.
    """

    count: int
    width: int
    heads: int
    number_of_heads: int
    inner: int
    gated: bool
    parameters: int
    weights: int

    def sample(
        self, name: str, parameters: int, head: int, tokens: int, vocabulary: int = 0, *, fused: bool = True
    ) -> ModelCount:
        """Return the counts of a model with these layers, for samples of ``tokens`` tokens.

        Activations of a token in a layer take 18 bytes times the width, and 4 (gated: 8) times the inner width, in 16
        bits (Korthikanti et al. 2022, section 4.1, without dropout and scores). Scores are 5 bytes for each head and
        pair of tokens (equation 1).

        Args:
            name: name of the model.
            parameters: parameters of the whole model.
            head: weights of the output, which each token is multiplied with.
            tokens: tokens of a sample.
            vocabulary: entries of the output for each token; 0: none.
            fused: whether attention is one kernel, which keeps no scores, in the family's published code.
        """
        weights = self.count * self.weights + head
        attention_flops = 4.0 * tokens**2 * self.heads * self.count
        activations = self.count * (18 * self.width + (8 if self.gated else 4) * self.inner) + LOGIT_BYTES * vocabulary
        return ModelCount(
            name=name,
            kind="transformer",
            parameters=parameters,
            forward_flops=2.0 * tokens * weights + attention_flops,
            attention_flops=attention_flops,
            activation_bytes=float(tokens * activations),
            layers=self.count,
            sample=sequence(tokens),
            logits=float(tokens * vocabulary),
            score_bytes=0.0 if fused else 5.0 * tokens**2 * self.number_of_heads * self.count,
        )


def _t5(fields: Fields, tokens: int | None) -> ModelCount:
    """Return the counts of a T5 (Raffel et al. 2020), or, gated and untied, an mT5 or FLAN-T5; faults are noted.

    ``tokens`` are the encoder's, and as many the decoder's; None: as configured, 512 by default.
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
    each = tokens or fields.whole("n_positions", default=512)
    attentions = encoder + 2 * decoder
    attention_flops = 4.0 * each**2 * all_heads * attentions
    kept = 10 * width + (8 if gated else 4) * inner
    return ModelCount(
        name="t5",
        kind="transformer",
        parameters=copies * vocabulary * width + weights + (2 * encoder + 3 * decoder + 2) * width + biases,
        forward_flops=2.0 * each * (weights + vocabulary * width) + attention_flops,
        attention_flops=attention_flops,
        activation_bytes=float(
            each * ((encoder + decoder) * kept + decoder * 5 * width + attentions * 8 * all_heads)
            + LOGIT_BYTES * each * vocabulary
        ),
        layers=encoder + decoder,
        sample=f"{each:,} tokens in and as many out",
        logits=float(each * vocabulary),
    )


def _whisper(fields: Fields, tokens: int | None) -> ModelCount:
    """Return the counts of a Whisper (Radford et al. 2022) for samples of 30 seconds of sound; faults are noted.

    ``tokens`` are the decoder's, at most as many as it has positions; None: so many.
    """
    width, vocabulary = fields.whole("d_model"), fields.whole("vocab_size", default=51865)
    bins, places = fields.whole("num_mel_bins", default=80), fields.whole("max_source_positions", default=1500)
    words = fields.whole("max_target_positions", default=448)
    encoder, decoder = fields.whole("encoder_layers"), fields.whole("decoder_layers")
    inner = [2 * width * fields.whole(f"{side}_ffn_dim", default=4 * width) for side in ("encoder", "decoder")]
    attention, text = 4 * width * width, min(tokens or words, words)
    listening = 3 * width * (bins + width)
    reads, writes = encoder * (attention + inner[0]), decoder * (attention + inner[1])
    hears = decoder * attention  # half of it reads what was heard, the other half writes
    norms = (encoder * 13 + decoder * 22 + 6) * width
    attention_flops = 4.0 * width * (encoder * places**2 + decoder * (text**2 + text * places))
    matrices = (listening + reads + hears / 2) * places + (writes + hears / 2 + vocabulary * width) * text
    kept = encoder * places * 34.0 * width + decoder * text * 52.0 * width + LOGIT_BYTES * vocabulary * text
    return ModelCount(
        name="whisper",
        kind="transformer",
        parameters=listening + reads + writes + hears + norms + (places + words + vocabulary) * width,
        forward_flops=2.0 * matrices + 2.0 * 3 * bins * width * places + attention_flops,
        attention_flops=attention_flops,
        activation_bytes=kept,
        layers=encoder + decoder,
        sample=f"30 s of sound and {text:,} tokens",
        logits=float(vocabulary * text),
    )


def _vit(fields: Fields, _: int | None) -> ModelCount:
    """Return the counts of a vision transformer with a class token and a classifier; faults are noted."""
    pixels = fields.whole("image_size", default=224)
    patch, along = fields.patches("image_size", pixels, default=16)
    patches = along**2
    body = Transformer().layers(fields)
    embedding = _linear(fields.whole("num_channels", default=3) * patch * patch, body.width)
    parameters = embedding + (patches + 4) * body.width + body.count * body.parameters
    counted = body.sample("vit", parameters + _linear(body.width, fields.labels), embedding, patches + 1, fused=False)
    return replace(counted, sample=image(pixels))


def _swin(fields: Fields, _: int | None) -> ModelCount:
    """Return the counts of a Swin (Liu et al. 2021), which attends within windows; faults are noted.

    Each stage has half the side and twice the width of the one before.
    """
    pixels, patch = fields.whole("image_size", default=224), fields.whole("patch_size", default=4)
    colours, width = fields.whole("num_channels", default=3), fields.whole("embed_dim", default=96)
    stages = fields.stages(depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
    window = fields.whole("window_size", default=7)
    side, parameters = math.ceil(pixels / patch), _linear(colours * patch * patch, width)
    flops, kept = 2.0 * parameters * side * side, 0.0
    for stage, (depth, heads_here) in enumerate(stages):
        if stage > 0:  # four neighbours become one of twice the width
            side, width = math.ceil(side / 2), 2 * width
            parameters += 2 * width * width + 4 * width
            flops += 2.0 * 2 * width * width * side * side
        weights = 12 * width * width  # of attention, and of inner matrices four times as wide
        parameters += depth * (weights + 13 * width + (2 * window - 1) ** 2 * heads_here)
        flops += depth * side * side * (2.0 * weights + 4.0 * window * window * width)
        kept += depth * side * side * 34.0 * width
    head = _linear(width, fields.labels)
    return ModelCount(
        name="swin",
        kind="transformer",
        parameters=parameters + head,
        forward_flops=flops + 2.0 * head,
        activation_bytes=kept,
        layers=sum(depth for depth, _ in stages),
        sample=image(pixels),
    )


def _resnet(fields: Fields, _: int | None) -> ModelCount:
    """Return the counts of a ResNet (He et al. 2016) with strides in its 3 x 3 convolutions; faults are noted.

    Blocks have a bottleneck unless ``layer_type`` is 'basic'; 1,000 layers of a stage are counted at most.
    """
    pixels = side = fields.whole("image_size", default=224)
    inputs = fields.whole("embedding_size", default=64)
    stages = fields.stages(hidden_sizes=(256, 512, 1024, 2048), depths=(3, 4, 6, 3))
    bottleneck = fields.values.get("layer_type", "bottleneck") == "bottleneck"
    convolutions = [(fields.whole("num_channels", default=3), inputs, 7, math.ceil(side / 2))]
    side = math.ceil(side / 4)
    for stage, (outputs, depth) in enumerate(stages):
        for layer in range(min(depth, 1000)):
            before, side = side, math.ceil(side / 2) if stage > 0 and layer == 0 else side
            if bottleneck:
                narrow = max(1, outputs // 4)
                convolutions += [
                    (inputs, narrow, 1, before),
                    (narrow, narrow, 3, side),
                    (narrow, outputs, 1, side),
                ]
            else:
                convolutions += [(inputs, outputs, 3, side), (outputs, outputs, 3, side)]
            if inputs != outputs or before != side:  # the way round a block
                convolutions.append((inputs, outputs, 1, side))
            inputs = outputs
    return _convolutional("resnet", pixels, convolutions, _linear(inputs, fields.labels))


def _convnext(fields: Fields, _: int | None) -> ModelCount:
    """Return the counts of a ConvNeXt (Liu et al. 2022), of 7 x 7 depthwise convolutions; faults are noted.

    1,000 layers of a stage are counted at most.
    """
    pixels, shrinks = fields.whole("image_size", default=224), fields.whole("patch_size", default=4)
    stages = fields.stages(hidden_sizes=(96, 192, 384, 768), depths=(3, 3, 9, 3))
    inputs, side, convolutions = fields.whole("num_channels", default=3), pixels, []
    for width, depth in stages:
        side = math.ceil(side / shrinks)
        convolutions.append((inputs, width, shrinks, side))
        block = [(1, width, 7, side), (width, 4 * width, 1, side), (4 * width, width, 1, side)]
        convolutions += min(depth, 1000) * block
        inputs, shrinks = width, 2
    return _convolutional("convnext", pixels, convolutions, _linear(inputs, fields.labels))


def _convolutional(name: str, pixels: int, convolutions: Sequence[tuple[int, int, int, int]], head: int) -> ModelCount:
    """Return the counts of a convolutional network; each output is kept twice, and normalised.

    Args:
        name: name of the family.
        pixels: side of the picture.
        convolutions: (channels in, channels out, side of the kernel, side of the output) of each.
        head: parameters of the classifier.
    """
    weights = [kernel * kernel * c_in * c_out for c_in, c_out, kernel, _ in convolutions]
    return ModelCount(
        name=name,
        kind="convolution",
        parameters=sum(weights) + sum(2 * c_out for _, c_out, _, _ in convolutions) + head,
        forward_flops=2.0 * (sum(w * place[3] ** 2 for w, place in zip(weights, convolutions, strict=True)) + head),
        activation_bytes=4.0 * sum(c_out * at * at for _, c_out, _, at in convolutions),
        layers=len(convolutions) + 1,
        sample=image(pixels),
    )


_LLAMA = Transformer(gated=True, tied=False)
_MIXTRAL = replace(_LLAMA, mixes="num_local_experts")
_QWEN_MOE = replace(_LLAMA, mixes="num_experts")
_BERT = Transformer(places=True, encodes=True)

FAMILIES: Mapping[str, Callable[[Fields, int | None], ModelCount]] = MappingProxyType(
    {
        "DiTTransformer2DModel": dit,
        "UNet2DConditionModel": unet,
        "albert": Transformer(places=True, encodes=True, shares=True),
        "apertus": Transformer(tied=False),
        "arcee": Transformer(tied=False),
        "bert": _BERT,
        "bloom": Transformer(),
        "camembert": _BERT,
        "codegen": Transformer(tied=False),
        "cohere": Transformer(gated=True),
        "cohere2": Transformer(gated=True),
        "convnext": _convnext,
        "deberta-v2": Transformer(encodes=True),
        "deit": _vit,
        "dinov2": _vit,
        "distilbert": _BERT,
        "electra": _BERT,
        "ernie4_5": Transformer(gated=True),
        "exaone4": _LLAMA,
        "falcon": Transformer(),
        "gemma": Transformer(gated=True),
        "gemma2": Transformer(gated=True),
        "gemma3_text": Transformer(gated=True),
        "glm": _LLAMA,
        "glm4": _LLAMA,
        "gpt2": Transformer(places=True),
        "gpt_bigcode": Transformer(places=True),
        "gpt_neox": Transformer(tied=False),
        "gpt_oss": _MIXTRAL,
        "gptj": Transformer(tied=False),
        "granite": _LLAMA,
        "granitemoe": _MIXTRAL,
        "helium": _LLAMA,
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": _MIXTRAL,
        "modernbert": Transformer(gated=True, encodes=True),
        "mpnet": _BERT,
        "mt5": _t5,
        "olmo": _LLAMA,
        "olmo2": _LLAMA,
        "olmoe": _QWEN_MOE,
        "opt": Transformer(places=True),
        "persimmon": Transformer(tied=False),
        "phi": Transformer(tied=False),
        "phi3": _LLAMA,
        "phimoe": _MIXTRAL,
        "qwen2": _LLAMA,
        "qwen2_moe": _QWEN_MOE,
        "qwen3": _LLAMA,
        "qwen3_moe": _QWEN_MOE,
        "resnet": _resnet,
        "roberta": _BERT,
        "seed_oss": _LLAMA,
        "smollm3": Transformer(gated=True),
        "stablelm": _LLAMA,
        "starcoder2": Transformer(),
        "swin": _swin,
        "t5": _t5,
        "vit": _vit,
        "whisper": _whisper,
        "xlm-roberta": _BERT,
    }
)
"""Functions that count a model, by ``model_type`` or ``_class_name`` of its configuration; parameter counts are within
a hundredth of what is published."""
