"""Which network interface the learner's ranks use."""

import os

import pytest

from r3async.world.interfaces import find_interface, interface_address, list_interfaces, use_interface


def test_an_interface_is_found_by_its_name_and_by_its_address():
    assert interface_address("lo") == "127.0.0.1"
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("192.0.2.255") == ""
    for name, addresses in list_interfaces().items():
        for address in addresses:
            assert address in list_interfaces()[find_interface(address)], name


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConnectionError, match=r"no network interface 'ib7' with an address: .*lo"):
        interface_address("ib7")


def test_what_the_environment_says_of_interfaces_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface("lo")
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("=ib0", "lo")
