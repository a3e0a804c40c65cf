"""The first process of a host that `hosts_apart` makes; it already has separate namespaces, and furnishes them.

`python -m tests.helpers.host_begins NAME ADDRESS SOCKET PEERS KEEP...`: sends the descriptor of its network device over
`SOCKET`, then waits until its input ends, which ends everything on the host. Below /tmp, only the paths `KEEP` are
visible. It imports nothing but the standard library, and needs neither `ip` nor `mount`.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
from pathlib import Path

MTU = 9000
QUEUE = 10_000
"""Number of packets that wait for the reader of the device."""
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCADDRT, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS = 0x890B, 0x8916, 0x891C, 0x8914
SIOCSIFMTU, SIOCSIFTXQLEN = 0x8922, 0x8943
IFF_UP, IFF_RUNNING, RTF_UP = 0x1, 0x40, 0x1
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x2000, 0x4000, 0x40000
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = (source.encode(), str(target).encode(), kind.encode() or None)
    if LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def private_files(name: str, peers: dict[str, str], keep: list[Path]) -> None:
    """Make everything that another host sees unwritable: /tmp and /dev/shm are private, and all else is read-only."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    names = "".join(f"{address} {host}\n" for host, address in {"localhost": "127.0.0.1", **peers}.items())
    mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
    new = Path("/dev/shm/tmp")
    new.mkdir()
    mount("tmpfs", new, "tmpfs", options="mode=1777")
    (new / "home").mkdir()
    (new / "hosts").write_text(names)
    (new / "resolv.conf").write_text("")
    for path in keep:
        if path.is_relative_to("/tmp"):
            below = new / path.relative_to("/tmp")
            below.mkdir(parents=True, exist_ok=True)
            mount(str(path), below, flags=MS_BIND | MS_REC)
    mount(str(new), "/tmp", flags=MS_MOVE)
    mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
    for target in _mounts():
        with contextlib.suppress(OSError):  # of what cannot be remounted, such as a file of a container's
            mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    for file in ("hosts", "resolv.conf"):
        mount(f"/tmp/{file}", f"/etc/{file}", flags=MS_BIND)


def _mounts() -> list[str]:
    own = ("/proc", "/sys", "/dev")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    targets = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [t for t in targets if t != "/tmp" and not any(t == o or t.startswith(f"{o}/") for o in own)]


def network(address: str) -> int:
    """Make a device `tun0` with this address, which gets everything that is not for this host. Returns its
    descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def ask(number: int, name: bytes, value: bytes) -> None:
            fcntl.ioctl(control, number, struct.pack("16s24s", name, value))

        ask(SIOCSIFFLAGS, b"lo", struct.pack("H", IFF_UP | IFF_RUNNING))
        ask(SIOCSIFADDR, b"tun0", _address(address))
        ask(SIOCSIFNETMASK, b"tun0", _address("255.255.255.0"))
        ask(SIOCSIFMTU, b"tun0", struct.pack("i", MTU))
        ask(SIOCSIFTXQLEN, b"tun0", struct.pack("i", QUEUE))
        ask(SIOCSIFFLAGS, b"tun0", struct.pack("H", IFF_UP | IFF_RUNNING))
        anywhere, name = _address("0.0.0.0"), ctypes.create_string_buffer(b"tun0")
        where = struct.pack("@L16s16s16sHhLPh", 0, anywhere, anywhere, anywhere, RTF_UP, 0, 0, 0, 0)
        route = where + bytes(-len(where) % 8) + struct.pack("@PLLH", ctypes.addressof(name), 0, 0, 0)
        fcntl.ioctl(control, SIOCADDRT, route)
    return device


def _address(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def reap_until_end_of_input() -> None:
    while True:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready and not os.read(0, 1):
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main() -> None:
    name, address, descriptor, peers, *keep = sys.argv[1:]
    socket.sethostname(name)
    private_files(name, dict(peer.split("=") for peer in peers.split(",")), [Path(path) for path in keep])
    with socket.socket(fileno=int(descriptor)) as outside:
        socket.send_fds(outside, [b"begun"], [network(address)])
    reap_until_end_of_input()


if __name__ == "__main__":
    main()
