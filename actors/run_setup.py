"""What all actors of one start of a run are told."""

from __future__ import annotations

from typing import Any

import msgspec

from r3async.data.versions import FIRST_LINEAGE, Lineage


class RunSetup(msgspec.Struct, frozen=True):
    """The values that all actors of one start of a run are given.

    Attributes:
        config: The configuration as plain data; see `config_from_dict`.
        run_dir: The run's directory, an absolute path.
        lineage: The lineage of this start, within which the versions of weights are counted.
    """

    run_id: str
    config: dict[str, Any]
    run_dir: str
    lineage: Lineage = FIRST_LINEAGE
