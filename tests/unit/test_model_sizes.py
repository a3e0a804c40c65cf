"""Sizes that a `config.json` leaves out: transformers, and vLLM with it, fill in numbers of their own."""

import pytest
from transformers import AutoConfig

from r3async.data.model_shape import EXPERT_COUNT_KEYS, ModelShapeError, parse_model_shape, read_moe_layers
from r3async.data.models import ARCHITECTURES, TORCH_ONLY_ARCHITECTURES
from r3async.tools.memory import PUBLISHED_CONFIGS
from tests.helpers.architectures import ALL, SHARED

PUBLISHED = {kind: {"model_type": kind} for kind in (*ARCHITECTURES, *TORCH_ONLY_ARCHITECTURES)}
TINY = {variant: {"model_type": variant.split("/")[0], **SHARED, **own} for variant, own in ALL.items()}


def filled(config):
    """As transformers understands it, and writes it."""
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **rest).to_dict()


CONFIGS = {
    **{f"{kind} with defaults": config for kind, config in PUBLISHED.items()},
    **{f"tiny {variant}": config for variant, config in TINY.items()},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_is_missing_is_filled_in_as_transformers_does_or_refused_by_name(name):
    whole = filled(CONFIGS[name])
    text = whole.get("text_config", whole)
    assert parse_model_shape(whole).num_layers == text.get("num_hidden_layers", len(text.get("layers_block_type", ())))
    refused = []
    for key in text:
        if key == "model_type":
            continue
        config = {k: v for k, v in text.items() if k != key}
        config = whole | {"text_config": config} if text is not whole else config
        try:
            read = parse_model_shape(config)
        except ModelShapeError as error:
            refused.append((key, str(error)))
        else:
            assert read == parse_model_shape(filled(config)), f"without {key!r}"
    assert all(key in said for key, said in refused), refused
    always = {"hidden_size", "vocab_size", "layers_block_type" if "layers_block_type" in text else "num_hidden_layers"}
    unused = CONFIGS[name]["model_type"] in (
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    )  # no layer of theirs is dense
    assert always | (set() if unused else {"intermediate_size"}) < {key for key, _ in refused}


@pytest.mark.parametrize("kind", [kind for kind, known in ARCHITECTURES.items() if known.moe_module])
def test_the_other_name_for_the_number_of_experts_is_read_where_transformers_reads_it(kind):
    """A checkpoint of transformers 5 has num_local_experts where one of version 4 has num_experts."""
    whole = filled(TINY[kind])
    (own,) = [key for key in EXPERT_COUNT_KEYS if key in whole]
    for other in set(EXPERT_COUNT_KEYS) - {own}:
        config = {k: v for k, v in whole.items() if k != own} | {other: 6}
        if filled(config)[own] == 6:
            assert read_moe_layers(config)[0].num_experts == 6
        else:
            with pytest.raises(ModelShapeError, match="has no 'n"):
                read_moe_layers(config)
            assert read_moe_layers(config | {own: 5})[0].num_experts == 5


PUBLISHED_LAYERS = {
    # mixtures, layers with attention, layers that keep a state, billions of parameters
    "AI21-Jamba-1.5-Mini": (16, 4, 28, 51.6),
    "Bamba-9B": (0, 3, 29, 9.8),
    "DeepSeek-V3": (58, 61, 0, 671.0),
    "DeepSeek-V3.2-Exp": (58, 61, 0, 671.0),
    "ERNIE-4.5-21B-A3B": (27, 28, 0, 21.8),
    "Falcon-H1-7B": (0, 44, 44, 7.6),
    "GLM-4.5-Air": (45, 46, 0, 106.9),
    "GLM-5.1": (75, 78, 0, 743.2),
    "Kimi-Linear-48B-A3B-Instruct": (26, 7, 20, 49.1),
    "LFM2-8B-A1B": (22, 6, 18, 8.3),
    "Llama-3.1-8B-Instruct": (0, 32, 0, 8.0),
    "MiniMax-M2.5": (62, 62, 0, 228.7),
    "Mixtral-8x7B-v0.1": (32, 32, 0, 46.7),
    "Moonlight-16B-A3B": (26, 27, 0, 16.0),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (23, 6, 23, 31.6),
    "Nemotron-H-8B-Base-8K": (0, 4, 24, 8.1),
    "OLMoE-1B-7B": (16, 16, 0, 6.9),
    "Olmo-Hybrid-7B": (0, 8, 24, 7.4),
    "Qwen1.5-MoE-A2.7B-Chat": (24, 24, 0, 14.3),
    "Qwen2.5-1.5B-Instruct": (0, 28, 0, 1.5),
    "Qwen2.5-7B-Instruct": (0, 28, 0, 7.6),
    "Qwen3-235B-A22B": (94, 94, 0, 235.1),
    "Qwen3-30B-A3B": (48, 48, 0, 30.5),
    "Qwen3-Next-80B-A3B-Instruct": (48, 12, 36, 79.7),
    "Qwen3.5-35B-A3B": (40, 10, 30, 34.7),
    "Qwen3.5-9B": (0, 8, 24, 9.0),
    "gpt-oss-20b": (24, 24, 0, 20.9),
    "granite-4.0-h-tiny": (40, 4, 36, 6.9),
}
"""Layers by each model's published description; parameters are those of its text model, which its name rounds."""


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_published_models_have_their_layers_and_sizes(name):
    shape = parse_model_shape(PUBLISHED_CONFIGS[name], name)
    kinds = (shape.moe_layers, shape.attention_layers, shape.recurrent_layers)
    assert (*map(len, kinds), round(shape.num_parameters / 1e9, 1)) == PUBLISHED_LAYERS[name]


KIMI = PUBLISHED_CONFIGS["Kimi-Linear-48B-A3B-Instruct"]
"""It has names of its own for most numbers."""


def test_kimi_linear_has_the_parameters_that_its_files_have():
    assert parse_model_shape(KIMI).num_parameters == pytest.approx(49_122_681_728, rel=1e-5)


@pytest.mark.parametrize(
    ("names", "key"), [(("num_experts_per_token",), "num_experts_per_token"), (("num_experts",), "num_experts")]
)
def test_what_a_family_calls_by_its_own_name_is_missed_by_that_name(names, key):
    config = {k: v for k, v in KIMI.items() if k not in names}
    with pytest.raises(ModelShapeError, match=key):
        parse_model_shape(config)
