"""The network interfaces of this host."""

from __future__ import annotations

import os
import socket

import psutil


def list_interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, IPv4 first."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for kind in kinds for a in addresses if a.family == kind]
        for name, addresses in sorted(psutil.net_if_addrs().items())
    }


def interface_address(interface: str) -> str:
    """The first address of an interface. Raises `ConnectionError` with those that there are."""
    here = list_interfaces()
    if not (addresses := here.get(interface)):
        names = ", ".join(name for name, has in here.items() if has)
        raise ConnectionError(f"{socket.gethostname()} has no network interface {interface!r} with an address: {names}")
    return addresses[0]


def find_interface(address: str) -> str:
    """The interface that has an address; "" if none has."""
    return next((name for name, addresses in list_interfaces().items() if address in addresses), "")


def use_interface(name: str) -> None:
    """Collectives (NCCL, gloo) that this process begins from now on use that interface. A variable that is set already says
    otherwise, and stays."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
