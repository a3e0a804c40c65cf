"""How hosts are written, and which of them others can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Only this machine can reach it. A name other than `localhost` counts as one that others can reach.

    Takes IPv6 with and without brackets, and IPv4 that is mapped into it (`::ffff:127.0.0.1`).
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(bare_host(host))
    except ValueError:
        return False
    # Python before 3.13 does not look into a mapped address.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def bare_host(host: str) -> str:
    """Without the brackets of an IPv6 address, as sockets take it."""
    return host.removeprefix("[").removesuffix("]")


def in_url(host: str) -> str:
    """With the brackets that a URL puts around an IPv6 address."""
    return f"[{bare_host(host)}]" if ":" in host else host
