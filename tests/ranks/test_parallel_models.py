"""What an architecture adds is divided among ranks like the rest: gradients of two ranks are those of transformers."""

import pytest

from tests.helpers import architectures as ha
from tests.helpers.parity import assert_gradients, batch, config, gradients_of_rank, reference

CASES = [
    ("deepseek_v3", {"tp": 2, "ep": 2}, "selective"),
    ("deepseek_v3", {"cp": 2, "ep": 2}, "selective"),
    ("olmoe", {"cp": 2}, "none"),
    ("deepseek_v3/moonlight", {"pp": 2}, "full"),
    ("glm4_moe", {"tp": 2}, "full"),
    ("mixtral", {"tp": 2, "ep": 2}, "none"),
    ("qwen2_moe", {"tp": 2}, "none"),
    ("olmoe", {"dp": 2, "ep": 2}, "selective"),
    ("qwen2", {"tp": 2}, "none"),
    ("llama/linear", {"pp": 2}, "full"),
]


@pytest.mark.parametrize(("variant", "layout", "recompute"), CASES, ids=[f"{v}-{'-'.join(p)}" for v, p, _ in CASES])
def test_two_ranks_have_the_gradient_of_transformers(two_ranks, tmp_path, variant, layout, recompute):
    """With four layers, so that two stages have as many."""
    path = ha.make_model(tmp_path / "m", variant, num_hidden_layers=4)
    layers = ha.mixtures(path)
    replay = "rollout" if layers else "off"
    micro_batches = batch(layers=layers or 1, routes=layers > 0)
    settings = config(recompute=recompute, replay=replay, **layout)
    answers = two_ranks.call(gradients_of_rank, str(path), settings, micro_batches)
    assert_gradients(answers, reference(path, micro_batches, settings))
