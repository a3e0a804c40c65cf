"""What a plan says of an engine's memory beside its weights is what vLLM makes of the same model."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from torch._utils import _element_size
from transformers import AutoConfig
from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from r3async.data.model_shape import parse_model_shape
from r3async.data.write_sizes import DTYPE_BYTES
from r3async.tools.adapted import SERVED_TOGETHER
from tests.helpers import architectures as ha

STATES = {
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_next", "Qwen3NextForCausalLM"),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridForCausalLM"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
}
"""vLLM's module and class of each family that keeps states. Qwen3.5's own, which counts as this one does, imports torchvision."""
UPDATES = {"qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration", "nemotron_h": "NemotronHForCausalLM"}
"""Classes for which vLLM chooses the dtype of states itself."""
SAID = {"qwen3_5_moe_text": {"mamba_ssm_dtype": "float32"}}
"""Keys of published files."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", STATES)
def test_a_state_has_the_bytes_that_vllm_keeps_of_a_sequence(family, dtype):
    described = AutoConfig.for_model(family, **(ha.SHARED | ha.TORCH_ONLY[family] | SAID.get(family, {})))
    mixer = parse_model_shape(json.loads(described.to_json_string(use_diff=False))).recurrent_mixer
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=described, hf_text_config=described, dtype=getattr(torch, dtype)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", use_replayssm=False),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    module, name = STATES[family]
    if family in UPDATES:
        MODELS_CONFIG_MAP[UPDATES[family]].verify_and_update_config(engine)
    owner = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    shapes = owner.get_mamba_state_shape_from_config(engine)
    dtypes = owner.get_mamba_state_dtype_from_config(engine)
    kept = [torch.Size(shape).numel() * _element_size(each) for shape, each in zip(shapes, dtypes, strict=True)]
    width = DTYPE_BYTES[dtype]
    planned = [mixer.last_inputs * width, mixer.state * DTYPE_BYTES.get(mixer.state_dtype, width)]
    assert [size for size in planned if size] == kept


def test_matrices_that_vllm_serves_together_have_slots_together():
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for joined, names in zip(packed, SERVED_TOGETHER, strict=True):
        for name in names:
            assert is_in_target_modules(f"model.layers.0.self_attn.{joined}", [name], packed)
        assert not is_in_target_modules(f"model.layers.0.self_attn.{joined}", ["o_proj"], packed)
