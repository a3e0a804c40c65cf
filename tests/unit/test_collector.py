"""The garbage collector while modules and models are loaded."""

import gc

import pytest

from r3async.world.processes import pause_garbage_collector


@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_collected_meanwhile_and_all_is_as_before_also_after_a_failure(before):
    def load():
        assert not gc.isenabled()
        raise ImportError

    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(ImportError), pause_garbage_collector():
            load()
        assert gc.isenabled() is before
    finally:
        gc.enable()
