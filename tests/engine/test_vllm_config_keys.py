"""Each key of a `config.json`, changed alone: vLLM computes what transformers does, or cannot run the model, or the checks of a
start refuse the value by name.

A key that vLLM does not read gives another model without an error. Every key of every family that engines serve is either changed
here, or a size that the tensors' shapes have too, or one of `NEUTRAL`.
"""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from r3async.data.engine_models import find_engine_model
from r3async.untrusted import decode_model_config
from tests.helpers import architectures as ha
from tests.helpers.engine import prompt
from tests.helpers.engine_models import HYBRIDS, PlainModel, make_engine_model

NEUTRAL = frozenset(
    """
    _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
    is_encoder_decoder label2id max_position_embeddings model_type output_attentions output_hidden_states
    output_router_logits pad_token_id pretraining_tp problem_type return_dict router_aux_loss_coef
    router_jitter_noise attention_dropout transformers_version use_cache mamba_chunk_size num_nextn_predict_layers
    scoring_func topk_method
    """.split()  # noqa: SIM905
)
"""Keys that transformers does not compute logits with. Dropout and jitter are for training. Layers for multi-token prediction are
not computed by either side."""
SIZES = frozenset(
    """
    head_dim hidden_size intermediate_size kv_lora_rank linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_d_conv mamba_d_head mamba_d_state
    mamba_expand mamba_n_groups mamba_n_heads moe_intermediate_size n_routed_experts n_shared_experts
    num_attention_heads num_experts num_hidden_layers num_key_value_heads num_local_experts q_lora_rank
    qk_head_dim qk_nope_head_dim qk_rope_head_dim shared_expert_intermediate_size shared_intermediate_size
    v_head_dim vocab_size
    """.split()  # noqa: SIM905
)
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
ALL_FAMILIES: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 1.0},
    {"tie_word_embeddings": True},
    THETA,
]
MIXTURES = [*ALL_FAMILIES, {"num_experts_per_tok": 3}]
SIGMOIDS = [
    {"first_k_dense_replace": 2},
    {"n_group": 2},
    {"n_group": 4, "topk_group": 3},
    {"routed_scaling_factor": 0.5},
]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [
        *MIXTURES,
        {"attention_bias": True},
        {"decoder_sparse_step": 2, "mlp_only_layers": []},
        {"mlp_only_layers": [0]},
        {"norm_topk_prob": False},
        WINDOW,
    ],
    "qwen2_moe": [
        *MIXTURES,
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"norm_topk_prob": True},
        {"qkv_bias": False},
        WINDOW | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ],
    "olmoe": [*MIXTURES, {"attention_bias": True}, {"clip_qkv": 0.2}, {"norm_topk_prob": True}],
    "mixtral": [*MIXTURES, {"sliding_window": 8}],
    "deepseek_v3": [
        *MIXTURES,
        *SIGMOIDS,
        {"attention_bias": True},
        {"norm_topk_prob": False},
        {"rope_interleave": False},
    ],
    "glm4_moe": [
        *MIXTURES,
        *SIGMOIDS,
        PARTIAL,
        {"attention_bias": False},
        {"norm_topk_prob": False},
        {"use_qk_norm": True},
    ],
    "qwen3": [
        *ALL_FAMILIES,
        {"attention_bias": True},
        WINDOW | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ],
    "qwen2": [
        *ALL_FAMILIES[:2],
        THETA,
        {"tie_word_embeddings": False},
        WINDOW | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ],
    "llama": [*ALL_FAMILIES, {"attention_bias": True}, {"mlp_bias": True}],
    "gpt_oss": [
        *MIXTURES[1:],
        {"attention_bias": False},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"sliding_window": 40},
        {"swiglu_alpha": 0.3},
        {"swiglu_limit": 0.3},
        {"rope_parameters": ha.YARN | {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ],
    "qwen3_next": [
        *MIXTURES[:3],
        MIXTURES[-1],
        PARTIAL,
        {"attention_bias": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"norm_topk_prob": False},
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ],
    "qwen3_5_moe_text": [
        *MIXTURES,
        PARTIAL,
        {"attention_bias": True},
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ],
    "granitemoehybrid": [
        *MIXTURES[:-2],
        THETA | {"position_embedding_type": "rope"},
        {"num_experts_per_tok": 3},
        {"attention_bias": True},
        {"attention_multiplier": 2.0},
        {"embedding_multiplier": 5.0},
        {"logits_scaling": 4.0},
        {"residual_multiplier": 0.2},
        {"mamba_conv_bias": False},
        {"mamba_proj_bias": True},
        {"time_step_limit": [0.0, 0.05]},
        {"layer_types": ["mamba", "attention", "mamba"]},
    ],
}
"""By family, keys with another value. Where several are changed at once, the first has no effect without the others."""
NEUTRAL_HERE = {"gpt_oss": {"hidden_act"}} | {kind: {"num_experts_per_tok"} for kind in ("qwen3", "qwen2", "llama")}
BFLOAT16 = {"gpt_oss", *HYBRIDS}


SCALES = {
    r"(gate|router|router\.layer)\.weight$": 0.3,
    r"o_proj\.weight|experts|(in|out)put_linear": 2.0,
    r"self_attn\.q_norm\.weight": 16.0,
}
"""Of two experts that a token chooses, both count, and so do attention and experts beside what they are added to, and
positions within attention."""


def make(directory: Path, variant: str, dtype: str, changes: dict[str, Any]) -> Path:
    """Make a model whose weights are numbers of `dtype`."""
    make_engine_model(directory, variant, 0, dtype, **copy.deepcopy(changes))  # transformers adds to some values
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        for part, scale in SCALES.items():
            if re.search(part, name):
                tensor *= scale
        tensors[name] = tensor.to(getattr(torch, dtype)).float()
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def score_all(models: list[Path], dtype: str, text: np.ndarray, folder: Path) -> list[np.ndarray]:
    np.save(folder / "text.npy", text)
    names = list(map(str, models))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.helpers.engine_scores",
            folder / "scores.npz",
            dtype,
            folder / "text.npy",
            *names,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr[-6000:])
    with np.load(folder / "scores.npz") as scores:
        return [scores[name] for name in names]


def is_refused(model: Path) -> bool:
    described = decode_model_config((model / "config.json").read_bytes())
    known = find_engine_model(described["model_type"])
    missing = any(described.get(key) != value for key, value in known.needed_config.items())
    return missing or any(True for _ in known.iter_differences(described))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", CHANGES)
def test_vllm_computes_what_config_json_says(variant, tmp_path):
    dtype, changes = "bfloat16" if variant in BFLOAT16 else "float32", [{}, *CHANGES[variant]]
    models = [make(tmp_path / str(i), variant, dtype, changed) for i, changed in enumerate(changes)]
    keys = json.loads((models[0] / "config.json").read_text()).keys()
    assert not keys - NEUTRAL - NEUTRAL_HERE.get(variant, set()) - SIZES - {k for changed in changes for k in changed}
    text = prompt(60, seed=1)
    expected = [PlainModel(model).read(text)[0] for model in models]
    found = score_all(models, dtype, text, tmp_path)
    tolerance = 0.1 if dtype == "bfloat16" else 1e-3
    wrong = {}
    for changed, model, plain, engine in zip(changes, models, expected, found, strict=True):
        effect = np.abs(plain - expected[0]).mean()
        differs = np.abs(plain - engine).mean() if len(engine) else np.inf
        close = differs < (min(tolerance, effect / 2) if changed else tolerance)
        print(changed, differs, effect)
        assert not changed or effect > tolerance, f"{changed} changes nothing"
        if is_refused(model):
            # Memory that nothing is loaded into may hold an embedding by chance.
            assert not close or "tie_word_embeddings" in changed, f"{changed} is refused without need"
        elif len(engine) and not close:
            wrong[str(changed)] = differs
    assert len(found[0]), "the unchanged model cannot be run"
    assert not wrong
