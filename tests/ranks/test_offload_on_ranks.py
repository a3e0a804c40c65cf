"""Ranks that keep moments in host memory make the checkpoint that others make, and go on from it."""

import pytest

from tests.helpers import models as hm
from tests.helpers.checkpoint import assert_same, begun, continued, fresh, on_ranks, paths, settings

LAYOUTS = [("megatron", {"dp": 2, "ep": 2}), ("megatron", {"cp": 2}), ("torch", {"dp": 2})]


@pytest.mark.parametrize(("backend", "layout"), LAYOUTS, ids=["ep2", "cp2", "fsdp2"])
def test_offloaded_ranks_train_the_same_bits(two_ranks, tmp_path, backend, layout):
    model_path = hm.make_hf_model(tmp_path / "model")
    config, offloaded = settings(backend, **layout), settings(backend, **layout)
    offloaded.learner.offload_moments = True
    straight, half, whole = (fresh(tmp_path / name) for name in ("straight", "half", "whole"))
    on_ranks(two_ranks, begun, model_path, config, 4, straight)
    on_ranks(two_ranks, begun, model_path, offloaded, 2, half)
    on_ranks(two_ranks, continued, model_path, offloaded, paths(half), 2, 2, whole)
    assert_same(paths(straight), paths(whole))
