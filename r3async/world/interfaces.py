"""The network interfaces of this host."""

from __future__ import annotations

import os
import socket

import psutil


def list_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for kind in kinds for a in addresses if a.family == kind]
        for name, addresses in sorted(psutil.net_if_addrs().items())
    }


def interface_address(interface: str) -> str:
    """Return the first address of an interface. Raises `ConnectionError` with the
    existing interfaces."""
    here = list_interfaces()
    addresses = here.get(interface)
    if not addresses:
        names = ", ".join(name for name, has in here.items() if has)
        raise ConnectionError(
            f"{socket.gethostname()} has no network interface {interface!r} with an "
            f"address: {names}"
        )
    return addresses[0]


def find_interface(address: str) -> str:
    """Return the interface that has an address; "" if none has."""
    return next((name for name, addresses in list_interfaces().items() if address in addresses), "")


def use_interface(name: str) -> None:
    """Make collectives (NCCL, gloo) that this process begins from now on use the interface `name`.
    A variable that is set already takes precedence."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
