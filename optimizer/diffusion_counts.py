"""What a diffusion model has and computes, counted from its configuration of the library diffusers.

UNet: residual blocks of two convolutions on each level, attention to the picture and to the prompt on some (Rombach et
al. 2022, appendix E). DiT: a transformer over patches whose norms are driven by the time (Peebles and Xie 2023).
A sample is one latent picture at one moment; the autoencoder and the prompt's encoder are not trained, and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.optimizer.model_counts import Fields, Kind, ModelCount, image

PROMPT_TOKENS = 77
"""Of CLIP's text encoder, which prompts are read by."""


@dataclass(kw_only=True)
class _Parts:
    """Running totals of a network's parameters, operations and activations."""

    parameters: int = 0
    flops: float = 0.0
    attention_flops: float = 0.0
    activation_bytes: float = 0.0
    layers: int = 0

    def matrix(self, rows: int, columns: int, *, times: int, bias: bool = True, kept: int = 2) -> None:
        """Add a weight matrix applied at ``times`` positions, whose output keeps ``kept`` bytes an entry."""
        self.parameters += rows * columns + columns * bias
        self.flops += 2.0 * rows * columns * times
        self.activation_bytes += kept * columns * times
        self.layers += 1

    def block(self, inputs: int, outputs: int, time: int, places: int) -> None:
        """Add a residual block: two convolutions of three by three, norms, and the time's place in it."""
        self.parameters += 2 * inputs + 2 * outputs
        self.matrix(9 * inputs, outputs, times=places, kept=4)
        self.matrix(time, outputs, times=1)
        self.matrix(9 * outputs, outputs, times=places, kept=4)
        if inputs != outputs:
            self.matrix(inputs, outputs, times=places)

    def attention(self, width: int, depth: int, prompt: int, places: int) -> None:
        """Add layers that attend to the picture and to a prompt of some width, each with a gated inner part."""
        self.parameters += 2 * width
        for _ in range(2):
            self.matrix(width, width, times=places)
        for _ in range(depth):
            self.parameters += 6 * width
            for rows, times in (3 * [(width, places)]) + [(width, places)] + 2 * [(prompt, PROMPT_TOKENS)]:
                self.matrix(rows, width, times=times, bias=False)
            for _ in range(2):
                self.matrix(width, width, times=places)
            self.matrix(width, 8 * width, times=places)
            self.matrix(4 * width, width, times=places)
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
    """Return the counts of Stable Diffusion's network, ``UNet2DConditionModel``."""
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
    """Return the counts of a diffusion transformer, ``DiTTransformer2DModel``."""
    heads, each = fields.whole("num_attention_heads", default=16), fields.whole("attention_head_dim", default=72)
    width, count = heads * each, fields.whole("num_layers", default=28)
    side, patch = fields.whole("sample_size", default=32), fields.whole("patch_size", default=2)
    channels = fields.whole("in_channels", default=4)
    outputs = fields.whole("out_channels", default=2 * channels)
    places, classes = max(1, side // patch) ** 2, fields.whole("num_embeds_ada_norm", default=1000)
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
