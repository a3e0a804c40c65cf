"""What several modules of this folder begin with."""

from __future__ import annotations

import pytest

from tests.helpers.engine import make_model


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other"), dense_layers=(1,), seed=1)
