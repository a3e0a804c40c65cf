"""A rank that loads a model holds its part of it, and hardly more at any time."""

import re
from pathlib import Path

import pytest
import torch
import transformers as tf

from r3async.learner import build_learner
from r3async.learner.optimizer import to_local
from tests.helpers import learner
from tests.helpers import models as hm
from tests.helpers.ranks import Ranks

LARGEST_TENSOR = 4 * 16 * 2 * 512 * 512
"""Bytes in float32 of the matrices of one layer's experts that are one tensor: gates and what they gate."""


def _save_model(directory: Path) -> Path:
    config = tf.Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=512,
        num_hidden_layers=12,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(directory)
    return directory


def _read_memory(name: str) -> int:
    (kibibytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return 1024 * int(kibibytes)


def _load(path: Path, backend: str) -> tuple[int, int]:
    """Load a model. Returns the bytes of this rank's part, and the most that it needed beyond what was there before."""
    parallel = {"dp": 2, "ep": 2} if backend == "megatron" else {"dp": 2}
    settings = learner.settings(learner__backend=backend, learner__dtype="bfloat16", learner__parallel=parallel)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _read_memory("VmRSS")
    made = build_learner(settings, path, frozen=True)
    peak = _read_memory("VmHWM") - before
    part = sum(to_local(p.detach()).nbytes for p in made.model.parameters())
    made.close()
    return part, peak


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_rank_needs_its_part_and_one_tensor(tmp_path, backend):
    ranks = Ranks(2, tmp_path)
    try:
        ranks.call(_load, hm.make_hf_model(tmp_path / "tiny"), backend)  # for what is imported and started
        for part, peak in ranks.call(_load, _save_model(tmp_path / "model"), backend):
            assert part > 100e6
            assert peak < 1.3 * part + LARGEST_TENSOR, f"{peak / 1e6:.0f} MB for {part / 1e6:.0f} MB"
    finally:
        ranks.close()
