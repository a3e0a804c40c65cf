"""Sizes that a `config.json` leaves out: transformers, and vLLM with it, fill in numbers of their own."""

import pytest
from transformers import AutoConfig

from r3async.data.model_shape import EXPERT_COUNT_KEYS, ModelShapeError, parse_model_shape, read_moe_layers
from r3async.data.models import ARCHITECTURES, TORCH_ONLY_ARCHITECTURES
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
