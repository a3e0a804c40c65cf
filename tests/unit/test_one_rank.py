"""A learner on one rank: the gradient of transformers, and layouts of several that it refuses."""

from __future__ import annotations

import pytest

from r3async.learner import LearnerError
from r3async.learner.megatron.backend import MegatronLearner
from tests.helpers import models as hm
from tests.helpers.parity import assert_equal, batch, config, gradients_of_rank, reference


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Four layers, of which the first is dense."""
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[0])


@pytest.fixture(scope="module")
def expected(model_path):
    return reference(model_path, batch(), config())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_rank_has_the_gradient_of_transformers(model_path, expected, recompute):
    assert_equal([gradients_of_rank(str(model_path), config(recompute=recompute), batch())], expected)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dp": 2}, r"dp 2 x cp 1 x tp 1 x pp 1 = 2 ranks, but there is 1"),
        ({"tp": 4}, r"parallel\.tp = 4 does not divide the model's 2 key/value heads"),
        ({"cp": 3}, r"parallel\.cp = 3 does not divide the 4 heads of a rank"),
        ({"pp": 3}, r"parallel\.pp = 3 does not divide the model's 4 layers"),
        ({"dp": 3, "ep": 3}, r"parallel\.ep = 3 does not divide the model's 8 experts"),
    ],
)
def test_a_layout_that_can_not_hold_the_model_is_refused(model_path, layout, message):
    with pytest.raises(LearnerError, match=message):
        MegatronLearner.from_pretrained(config(**layout), model_path)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"vpp": 2}, "virtual pipeline stages"),
        ({"dp": 2, "ep": 4}, "`ep` = 4 must divide dp . cp . tp = 2"),
    ],
)
def test_layouts_that_nobody_tested_are_refused_when_the_configuration_is_read(layout, message):
    with pytest.raises(ValueError, match=message):
        config(**layout)
