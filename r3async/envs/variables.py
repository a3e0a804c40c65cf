"""What environments' processes and agents' programs know of our own environment variables.

Among ours may be tokens of a cluster, of a model hub or of a metrics service: no task and no program that plays one needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

NAMES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TERM",
        "TMPDIR",
        "TEMP",
        "TMP",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NO_PROXY",
        "no_proxy",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE",
        "R3ASYNC_USER_PATH",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
    }
)
PREFIXES = ("LC_", "XDG_", "PYTHON")


def passed_on(more: Iterable[str] = (), ours: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of `ours` (this process's) that every program needs, and those of them that `more` names."""
    ours = os.environ if ours is None else ours
    wanted = NAMES | set(more)
    return {name: value for name, value in ours.items() if name in wanted or name.startswith(PREFIXES)}
