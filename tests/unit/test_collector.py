"""The garbage collector while modules and models are loaded."""

from __future__ import annotations

import gc

import pytest

from r3async.world.processes import pause_garbage_collector


def test_nothing_is_collected_meanwhile_and_all_is_as_before_afterwards():
    with pause_garbage_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_collects_again_after_a_failure():
    with pytest.raises(ImportError), pause_garbage_collector():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with pause_garbage_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
