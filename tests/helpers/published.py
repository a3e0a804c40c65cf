"""Tiny random checkpoints in the forms in which models are published."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen3_5MoeConfig

from tests.helpers.models import EXPERTS, TOP_K, VOCAB

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def make_vision_model(directory: Path, *, is_fused: bool = True, **text: Any) -> Path:
    """Save a random Qwen3.5-MoE with a vision tower and a layer for multi-token prediction, in bfloat16, and a stand-in
    tokenizer file; return `directory`.

    All layers have attention unless `text` has other `layer_types`.
    """
    kinds = {"layer_types": ["full_attention"] * TEXT["num_hidden_layers"]}
    tokens = dict(zip(("image", "video", "vision_start", "vision_end"), range(4), strict=True))
    config = Qwen3_5MoeConfig(
        text_config=TEXT | kinds | text, vision_config=VISION, **{f"{n}_token_id": i for n, i in tokens.items()}
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)

    def change(tensors):
        tensors["mtp.fc.weight"] = torch.randn(64, 128, generator=generator).bfloat16()
        tensors["mtp.norm.weight"] = torch.randn(64, generator=generator)
        return fuse_experts(tensors) if is_fused else tensors

    rewrite(directory, change)
    (directory / "tokenizer.json").write_text(json.dumps({"stand": "in"}))
    return directory


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with all experts of a layer in one, as Qwen3.5 is published."""
    found = [re.fullmatch(r"(.*\.experts)\.0\.gate_proj\.weight", name) for name in tensors]
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    for prefix in [match[1] for match in found if match]:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        kept[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), 1)
        kept[f"{prefix}.down_proj"] = down
    return kept


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model directory."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(directory: Path, change: Any, **described: Any) -> None:
    """Replace the tensors of a model directory by `change` of them, and set keys of its `config.json`."""
    tensors = change(read(directory))
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | described))


def split_files(directory: Path, count: int = 3, *, has_index: bool = True) -> None:
    """Divide the weights of a model directory into several files, with or without an index."""
    tensors = read(directory)
    (directory / "model.safetensors").unlink()
    names = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: tensors[n] for n in names if names[n] == file}, directory / file, {"format": "pt"})
    if has_index:
        index = {"metadata": {}, "weight_map": names}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def quantize_to_fp8(directory: Path, block: tuple[int, int] = (128, 128)) -> dict[str, torch.Tensor]:
    """Quantize the projections of a model directory in blocks, and return what its tensors stand for, in float32."""
    rows, columns = block
    meant = {}

    def change(tensors):
        out = {}
        for name, tensor in tensors.items():
            if not re.search(r"proj(\.weight)?$", name):
                out[name], meant[name] = tensor, tensor.float()
                continue
            size = tensor.shape[-2:]
            padded = torch.zeros(*tensor.shape[:-2], -(-size[0] // rows) * rows, -(-size[1] // columns) * columns)
            padded[..., : size[0], : size[1]] = tensor.float()
            blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
            scale = blocks.abs().amax((-3, -1)) / 448
            values = (blocks / scale[..., None, :, None]).to(torch.float8_e4m3fn)
            back = (values.float() * scale[..., None, :, None]).flatten(-2).flatten(-3, -2)
            out[name] = values.flatten(-2).flatten(-3, -2)[..., : size[0], : size[1]]
            out[f"{name}_scale_inv"] = scale
            meant[name] = back[..., : size[0], : size[1]]
        return out

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block), "fmt": "e4m3"}
    rewrite(directory, change, quantization_config=settings)
    return meant


def quantize_to_mxfp4(directory: Path) -> None:
    """Replace the experts of a gpt-oss by random ones in MXFP4."""
    generator = torch.Generator().manual_seed(3)

    def change(tensors):
        out = {}
        for name, tensor in tensors.items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                out[name] = tensor
                continue
            experts, inner, outer = tensor.shape
            shape = (experts, outer, inner // 32)
            out[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            out[f"{name}_scales"] = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        return out

    rewrite(directory, change, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
