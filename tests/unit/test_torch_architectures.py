"""Every declared architecture on the transformers learner: replayed routes, gradients and export beside plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.learner.batch.packing import collate
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.learner import LENGTHS, fully_recorded
from tests.helpers.torch import logits, settings


@pytest.mark.parametrize("variant", ha.VARIANTS)
def test_logits_gradients_and_export_are_those_of_transformers(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    learner, plain, layers = TorchLearner.load(settings(), path), ha.load_plain(path), ha.mixtures(path)
    samples = hm.make_samples(1, LENGTHS, layers=layers or 1, routes=layers > 0)
    micro_batch = collate(fully_recorded(samples) if layers else samples)
    weight = torch.randn(micro_batch.tokens, hm.VOCAB, generator=torch.Generator().manual_seed(0))
    with learner.replay.bound(micro_batch):
        ours = logits(learner, micro_batch)
        (ours * weight).sum().backward()
    at = 0
    for sample in samples:
        rows = slice(at, at := at + len(sample.table))
        routes = sample.table["routed_experts"] if layers else np.zeros((0, 0, 0))
        with ha.forced(plain, routes):
            theirs = plain(torch.from_numpy(sample.table["token_ids"].astype(np.int64))[None]).logits[0]
        assert (ours[rows] - theirs).abs().max() < 1e-5 * theirs.abs().max()
        (theirs * weight[rows]).sum().backward()
    got, want = ha.gradients_of(learner.model.causal), ha.gradients_of(plain)
    assert set(got) == set(want)
    for name, expected in want.items():
        assert expected.abs().max() > 0, name
        assert (got[name] - expected).norm() < 1e-5 * expected.norm(), name
    source, out = load_file(path / "model.safetensors"), learner.export()
    assert set(out) == set(source)
    assert all(torch.equal(out[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe"])
def test_biases_of_experts_keep_float32_in_a_bfloat16_model(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    out, source = (
        TorchLearner.load(settings(learner__dtype="bfloat16"), path).export(),
        load_file(path / "model.safetensors"),
    )
    biases = [name for name in source if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(torch.equal(out[name], source[name]) for name in biases)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in out.items() if name not in biases)
