"""A batch trained with forced random routes has the same loss and the same gradients however ranks divide the work."""

import pytest

from tests.helpers import models as hm
from tests.helpers.parity import assert_equal, batch, config, gradients_of_rank, reference


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Four layers, of which the first is dense."""
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[0])


@pytest.fixture(scope="module")
def expected(model_path):
    return reference(model_path, batch(), config())


LAYOUTS = {
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "cp2-ep2": {"cp": 2, "ep": 2},
}
LARGE_LAYOUTS = {
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp2-tp2-ep2": {"dp": 2, "tp": 2, "ep": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp2-pp2": {"cp": 2, "pp": 2},
    # Two ranks of four have the same key and value heads.
    "cp4": {"cp": 4},
}
RECOMPUTE = ["none", "selective", "full"]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_gradient_of_one(two_ranks, model_path, expected, layout, recompute):
    settings = config(**LAYOUTS[layout], recompute=recompute)
    assert_equal(two_ranks.call(gradients_of_rank, str(model_path), settings, batch()), expected)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", LARGE_LAYOUTS)
def test_four_ranks_have_the_gradient_of_one(four_ranks, model_path, expected, layout, recompute):
    settings = config(**LARGE_LAYOUTS[layout], recompute=recompute)
    assert_equal(four_ranks.call(gradients_of_rank, str(model_path), settings, batch()), expected)
