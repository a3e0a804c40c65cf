"""Which parameters of a model the ranks of the torch backend divide by experts."""

import pytest

from r3async.learner.torch.backend import TorchLearner
from r3async.learner.torch.expert_parallel import find_expert_modules
from tests.helpers import architectures as ha
from tests.helpers import torch as ht


@pytest.mark.long
@pytest.mark.parametrize("variant", ha.ALL)
def test_the_stacks_of_each_family_are_found(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    model = TorchLearner.from_pretrained(ht.settings(), path).model
    found = find_expert_modules(model.layers, model.routing.num_experts if model.routing else 0)
    assert len(found) == ha.mixtures(path)
    everywhere = {n for n, _ in model.causal_lm.named_parameters() if ".experts." in n}
    assert len(everywhere) == sum(len(list(m.parameters())) for m in found)
