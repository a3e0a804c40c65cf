"""The configuration section `weights`, and the time limits that follow from bytes."""

from __future__ import annotations

from typing import Literal

from r3async.config.section import ByteCount, PositiveFloat, PositiveInt, Section

BASE_INSTALL_SECONDS = 120.0
"""Seconds to install any version, to which the time for its bytes is added."""
BASE_WRITE_SECONDS = 600.0
"""Seconds to write any version, to which the time for its bytes is added."""
BASE_CHECKPOINT_SECONDS = 1800.0
"""Seconds to write any checkpoint, to which the time for its bytes is added."""
FULL_BYTES_PER_SECOND = 2e8
"""Minimum rate in bytes per second where all of a file is written, or fetched and loaded by vLLM's
own loader: the 61 GB of 30 B parameters take an engine 100 to 280 s."""
DELTA_BYTES_PER_SECOND = 5e8
"""Minimum rate in bytes per second where only changes are fetched and the file is
loaded by the plan."""


def resolve_timeout(
    configured: float | None, base_seconds: float, nbytes: int, rate: float = FULL_BYTES_PER_SECOND
) -> float:
    """Return the seconds that work on `nbytes` may take: `configured`, or by default `base_seconds`
    and a second for each `rate` bytes."""
    return base_seconds + nbytes / rate if configured is None else configured


class WeightsConfig(Section):
    backend: Literal["auto", "shared_memory", "tcp", "nccl"] = "auto"
    """Transfer of weights to the engines. `shared_memory`: a file mapped by engines on the
    learner's host. `tcp`: to one such file on each other host, as changes or whole. `auto`: `tcp`
    if there are several hosts. `nccl`: between GPUs; it has not run on GPUs yet."""
    relay: bool = True
    """With `tcp`, let generators' hosts pass weights on, so that the learner sends a version only
    twice. They listen on a free port, with the run's keys; one that others cannot reach is left
    out."""
    bucket_bytes: ByteCount = 64 * 2**20
    """Size of the pieces in which weights are converted and sent."""
    install_timeout: PositiveFloat | None = None
    """Seconds that an engine may take to get and install a version before it is restarted.
    Default: 120, plus 1 for each 500 MB, or for each 200 MB the first time."""
    write_timeout: PositiveFloat | None = None
    """Seconds that writing a version may take; the step after the next waits for it. Default:
    600, plus 1 for each 200 MB."""
    probe: bool = True
    """Compare log-probs of learner and engine, on a fixed text and on tokens sampled after it: at
    the first delivery, every `probe_every` versions, and after a generator's restart. A mismatch
    stops the run and names the tensor."""
    probe_every: PositiveInt = 10
    """Versions between two probes of a generator."""
    probe_tolerance: float | None = None
    """Mean |difference| in nats that the probe accepts. Default: 0.15; if engine and learner are
    both float32, 1e-3, or 0.019 for an engine on GPUs."""
    directory: str = ""
    """Directory of published weights. Default: shared memory (`/dev/shm`), or the temporary
    directory where there is none."""

    def resolve_install_timeout(self, nbytes: int, first: bool) -> float:
        """Return the seconds that `install_timeout` allows for a version of `nbytes`; `first` if
        the engine has no weights yet."""
        rate = FULL_BYTES_PER_SECOND if first else DELTA_BYTES_PER_SECOND
        return resolve_timeout(self.install_timeout, BASE_INSTALL_SECONDS, nbytes, rate)

    def resolve_write_timeout(self, nbytes: int) -> float:
        """Return the seconds that `write_timeout` allows for a version of `nbytes`."""
        return resolve_timeout(self.write_timeout, BASE_WRITE_SECONDS, nbytes)
