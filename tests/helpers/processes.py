"""What tests ask about processes that they did not start themselves."""

from __future__ import annotations

import psutil


def has_ended(pid: int) -> bool:
    """Tell whether no process with this id runs; one that nobody has waited for yet has ended as well."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
