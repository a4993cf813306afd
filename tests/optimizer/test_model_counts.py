"""Parameters and operations counted from configurations are those that are published, and hostile files are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.optimizer.model_counts import of_flops, of_parameters
from hetopt.optimizer.model_families import FAMILIES, of_config

LABELS = {"id2label": {str(place): "" for place in range(1000)}}


def bert(vocabulary: int, width: int, layers: int, **more: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * width,
        **more,
    }


def llama(vocabulary: int, width: int, layers: int, inner: int, heads: int, keys: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


def t5(vocabulary: int, width: int, layers: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "num_layers": layers,
        "d_ff": inner,
        "num_heads": heads,
        **more,
    }


def falcon(vocabulary: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}


def whisper(width: int, layers: int) -> dict[str, Any]:
    inner = {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    return {"d_model": width, "encoder_layers": layers, "decoder_layers": layers, **inner}


PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_positions": 1024}, 124_439_808),
    ("gpt2", {"vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_positions": 1024}, 354_823_168),
    ("gpt2", {"vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_positions": 1024}, 1_557_611_200),
    ("gpt_neox", bert(50304, 768, 12), 162_322_944),
    ("gpt_neox", bert(50432, 6144, 44), 20_554_567_680),
    ("opt", {"vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072}, 125_239_296),
    ("opt", {"vocab_size": 50272, "hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192}, 1_315_758_080),
    ("bloom", {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24}, 559_214_592),
    (
        "phi",
        {"vocab_size": 51200, "hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 10240},
        2_779_683_840,
    ),
    ("llama", llama(32000, 4096, 32, 11008, 32, 32), 6_738_415_616),
    ("llama", llama(32000, 5120, 40, 13824, 40, 40), 13_015_864_320),
    ("llama", llama(32000, 8192, 80, 28672, 64, 8), 68_976_648_192),
    ("llama", llama(128256, 4096, 32, 14336, 32, 8), 8_030_261_248),
    ("llama", llama(128256, 8192, 80, 28672, 64, 8), 70_553_706_496),
    ("mistral", llama(32000, 4096, 32, 14336, 32, 8), 7_241_732_096),
    ("mixtral", llama(32000, 4096, 32, 14336, 32, 8, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704),
    ("qwen2", llama(152064, 3584, 28, 18944, 28, 4), 7_615_616_512),
    ("qwen2", llama(151936, 896, 24, 4864, 14, 2, tie_word_embeddings=True), 494_032_768),
    (
        "qwen3_moe",
        llama(
            151936,
            2048,
            48,
            6144,
            32,
            4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        30_532_122_624,
    ),
    (
        "qwen2_moe",
        llama(
            151936,
            2048,
            24,
            5632,
            16,
            16,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        14_315_784_192,
    ),
    ("gemma", llama(256000, 2048, 18, 16384, 8, 1, head_dim=256), 2_506_172_416),
    ("gemma", llama(256000, 3072, 28, 24576, 16, 16, head_dim=256), 8_537_680_896),
    ("gemma2", llama(256000, 2304, 26, 9216, 8, 4, head_dim=256), 2_614_341_888),
    ("phi3", llama(32064, 3072, 32, 8192, 32, 32), 3_821_079_552),
    ("bert", bert(30522, 768, 12), 109_482_240),
    ("bert", bert(30522, 1024, 24), 335_141_888),
    ("roberta", bert(50265, 768, 12, **ROBERTA), 124_645_632),
    ("roberta", bert(50265, 1024, 24, **ROBERTA), 355_359_744),
    ("xlm-roberta", bert(250002, 768, 12, **ROBERTA), 278_043_648),
    ("distilbert", {"vocab_size": 30522, "dim": 768, "n_layers": 6, "hidden_dim": 3072}, 66_362_880),
    ("electra", bert(30522, 768, 12, embedding_size=768), 108_891_648),
    ("albert", bert(30000, 768, 12, embedding_size=128), 11_683_584),
    ("vit", {**bert(0, 768, 12), **LABELS}, 86_567_656),
    ("vit", {**bert(0, 1024, 24), **LABELS}, 304_326_632),
    ("resnet", {"depths": [3, 4, 6, 3], **LABELS}, 25_557_032),
    ("resnet", {"depths": [3, 4, 23, 3], **LABELS}, 44_549_160),
    (
        "resnet",
        {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic", **LABELS},
        11_689_512,
    ),
    ("convnext", {**LABELS}, 28_589_128),
    ("swin", {**LABELS}, 28_288_354),
    ("swin", {"depths": [2, 2, 18, 2], **LABELS}, 49_606_258),
    ("swin", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], **LABELS}, 87_768_224),
    ("t5", t5(32128, 512, 6, 2048, 8), 60_506_624),
    ("t5", t5(32128, 768, 12, 3072, 12), 222_903_552),
    ("t5", t5(32128, 1024, 24, 4096, 16), 737_668_096),
    ("t5", t5(32128, 1024, 24, 16384, 32, d_kv=128), 2_851_598_336),
    ("t5", t5(32128, 768, 12, 2048, 12, **GATED), 247_577_856),
    ("mt5", t5(250112, 512, 8, 1024, 6, **GATED), 300_176_768),
    ("whisper", whisper(384, 4), 37_760_640),
    ("whisper", whisper(768, 12), 241_734_912),
    ("whisper", whisper(1280, 32), 1_543_490_560),
    ("falcon", falcon(65024, 4544, 32, 71, multi_query=True), 6_921_720_704),
    ("falcon", falcon(65024, 8192, 60, 128, new_decoder_architecture=True, num_kv_heads=8), 41_303_293_952),
    ("falcon", falcon(50304, 2048, 24, 32, bias=True, multi_query=False, parallel_attn=False), 1_311_625_216),
]


@pytest.mark.parametrize(
    ("family", "fields", "published"), PUBLISHED, ids=lambda one: one if isinstance(one, str) else ""
)
def test_parameters_are_those_that_are_published(family: str, fields: dict[str, Any], published: int) -> None:
    assert of_config({"model_type": family, **fields}, 128).parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("family", "fields", "gigaflops"),
    [
        # Twice the multiply-adds of torchvision's and timm's tables: 4.09, 1.81, 4.46 and 17.6 (both of ViT's products
        # of attention are counted there too).
        ("resnet", {"depths": [3, 4, 6, 3], **LABELS}, 8.18),
        (
            "resnet",
            {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic", **LABELS},
            3.63,
        ),
        ("convnext", {**LABELS}, 8.92),
        ("vit", {**bert(0, 768, 12), **LABELS}, 35.1),
        # 512 tokens x (85 million weights in layers, and 24 million of the output over a vocabulary), and attention's.
        ("bert", {**bert(30522, 768, 12), "architectures": ["BertForSequenceClassification"]}, 96.7),
        ("bert", bert(30522, 768, 12), 121.4),
        # 4.5 and 15.4 multiply-adds in the paper.
        ("swin", {**LABELS}, 8.98),
        ("swin", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], **LABELS}, 30.9),
    ],
)
def test_operations_are_those_that_are_published(family: str, fields: dict[str, Any], gigaflops: float) -> None:
    counted = of_config({"model_type": family, **fields}, None)
    assert counted.forward_flops / 1e9 == pytest.approx(gigaflops, rel=0.02)


UNET = {
    "_class_name": "UNet2DConditionModel",
    "cross_attention_dim": 768,
    "down_block_types": [*3 * ["CrossAttnDownBlock2D"], "DownBlock2D"],
}
"""Of Stable Diffusion 1.5."""

UNET_XL = {
    **UNET,
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", *2 * ["CrossAttnDownBlock2D"]],
    "transformer_layers_per_block": [1, 2, 10],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (UNET, 859_520_964),
        ({**UNET, "cross_attention_dim": 1024}, 865_910_724),
        (UNET_XL, 2_567_463_684),
        ({"_class_name": "DiTTransformer2DModel"}, 675_129_632),
    ],
)
def test_networks_of_diffusion_have_the_parameters_that_are_published(config: dict[str, Any], parameters: int) -> None:
    assert of_config(config, None).parameters == pytest.approx(parameters, rel=1e-3)


def test_diffusion_takes_the_operations_that_are_published_and_keeps_what_torch_keeps() -> None:
    """338 G multiply-adds of Stable Diffusion's matrices, 118.6 of DiT-XL/2 (Peebles and Xie 2023, table 4).

    For its backward pass in bf16 torch saved 62.3 MB of a latent of 16 x 16, with SDPA (`saved_tensors_hooks`, 2026).
    """
    found, small = of_config(UNET, None), of_config({**UNET, "sample_size": 16}, None)
    transformer = of_config({"_class_name": "DiTTransformer2DModel"}, None)
    figures = (found.forward_flops - found.attention_flops, transformer.forward_flops, small.activation_bytes)
    assert figures == pytest.approx((2 * 338.7e9, 2 * 118.6e9, 62.3e6), rel=0.01)


def test_quantised_weights_carry_an_adapter() -> None:
    config = {"model_type": "llama", **next(fields for name, fields, _ in PUBLISHED if name == "llama")}
    quantised = {**config, "quantization_config": {"bits": 4, "quant_method": "awq"}}
    assert of_config(quantised, 128, whole=False) == of_config(config, 128)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_key_value_heads": 5}, "32 heads cannot share 5 of keys and values"),
    ],
)
def test_fields_that_are_missing_or_contradict_are_named(changed: dict[str, Any], says: str) -> None:
    fields = next(fields for name, fields, _ in PUBLISHED if name == "mixtral")
    with pytest.raises(BadInput, match=says):
        of_config({"model_type": "mixtral", **fields, **changed}, 128)


def test_a_token_of_a_decoder_takes_two_operations_a_weight() -> None:
    """6 N a token in training: N without positions, which are looked up."""
    small = of_config({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12}, 128)
    weights = 85_000_000 + 50257 * 768
    assert small.forward_flops / 128 == pytest.approx(2 * weights + 4 * 128 * 768 * 12, rel=0.01)
    experts = of_config(
        {"model_type": "mixtral", **next(fields for name, fields, _ in PUBLISHED if name == "mixtral")}, 128
    )
    assert experts.forward_flops / 128 == pytest.approx(2 * 12.9e9, rel=0.03), "two experts of eight are used"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-2-7b-hf"}, "an adapter"),
        (
            {"model_type": "llama", "quantization_config": {"bits": 4, "quant_method": "awq"}},
            r"quantised \('awq', 4 bits",
        ),
        ({"model_type": "llama", "quantization_config": {"bits": "\x1b[2J", "quant_method": ["x"]}}, "few bits"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "several models"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "mixture of experts that is not counted"),
    ],
)
def test_what_is_not_trained_whole_is_said(config: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says) as refused:
        of_config(config, 128)
    assert refused.value.hint


@given(st.floats(1e6, 1e12), st.integers(1, 8192))
def test_parameters_alone_make_a_transformer(parameters: float, tokens: int) -> None:
    counted = of_parameters(parameters, tokens)
    matrices = counted.forward_flops - counted.attention_flops
    assert 3 * matrices == pytest.approx(6 * parameters * tokens)
    assert counted.activation_bytes > 0


@given(st.floats(1e12, 1e26))
def test_operations_alone_make_the_model_that_uses_them_best(flops: float) -> None:
    parameters = of_flops(flops)
    assert 6 * parameters * 20 * parameters == pytest.approx(flops)


WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_embd",
    "n_layer",
    "dim",
    "n_layers",
    "hidden_dim",
    "embedding_size",
    "depths",
    "hidden_sizes",
    "image_size",
    "patch_size",
    "id2label",
    "num_labels",
    "ffn_dim",
    "d_model",
    "d_ff",
    "d_kv",
    "num_heads",
    "num_layers",
    "feed_forward_proj",
    "embed_dim",
    "window_size",
]


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(NAMES), WILD | st.integers(1, 64)))
def test_whatever_a_file_says_is_counted_or_refused(family: str, fields: dict[str, Any]) -> None:
    try:
        counted = of_config({"model_type": family, **fields}, None)
    except BadInput:
        return
    assert counted.parameters > 0
    assert 0 < counted.forward_flops < float("inf")


SPEAKING = (
    "apertus arcee codegen cohere cohere2 ernie4_5 exaone4 falcon glm glm4 gpt_bigcode gpt_oss gptj granite "
    "granitemoe helium olmo olmo2 olmoe persimmon phimoe seed_oss smollm3 stablelm starcoder2"
)
KINDS = {
    **dict.fromkeys(SPEAKING.split(), "CausalLM"),
    **dict.fromkeys(("camembert", "deberta-v2", "modernbert", "mpnet"), "MaskedLM"),
    **dict.fromkeys(("deit", "dinov2"), "ImageClassification"),
}


def test_families_have_the_parameters_that_transformers_gives_them() -> None:
    """As each is configured where nothing is said; nothing is allocated."""
    counted = {}
    for name, kind in KINDS.items():
        config = transformers.AutoConfig.for_model(name, architectures=[])
        with torch.device("meta"):
            model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
        fields = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [kind]}
        true = sum(parameter.numel() for parameter in model.parameters())
        counted[name] = of_config(fields, None).parameters / true
    assert {name: ratio for name, ratio in counted.items() if abs(ratio - 1) > 0.01} == {}
