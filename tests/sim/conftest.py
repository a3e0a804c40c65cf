"""What simulated runs begin with."""

import pytest

from tests.sim.whole import Machine


@pytest.fixture
def machine(untrained, tmp_path, request):
    """A simulated machine. Its seed is the test's parameter `seed`, if that has one."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    machine = Machine(tmp_path / "runs", untrained, given.get("seed", 0))
    yield machine
    machine.close()
