"""The configuration section `weights`."""

from __future__ import annotations

from typing import Literal

from r3async.config.section import ByteCount, PositiveInt, Section


class WeightsConfig(Section):
    backend: Literal["auto", "shared_memory", "tcp", "nccl"] = "auto"
    """Transfer of weights to the engines (docs/weights.md#weightsbackend). `auto`: `shared_memory`
    on one host, else `tcp`."""
    relay: bool = True
    """With `tcp`, let generators' hosts pass weights on: the learner then sends a version only
    twice."""
    bucket_bytes: ByteCount = 64 * 2**20
    """Size of the pieces in which weights are converted and sent."""
    probe: bool = True
    """Compare log-probs of learner and engine (docs/weights.md#which-check-finds-which-fault): at
    the first delivery, every `probe_every` versions, and after a generator's restart. A mismatch
    stops the run and names the tensor."""
    probe_every: PositiveInt = 10
    """Versions between two probes of a generator."""
    probe_tolerance: float | None = None
    """Mean |difference| in nats that the probe accepts. Default: 0.15; if engine and learner are
    both float32, 1e-3, or 0.019 for an engine on GPUs."""
    directory: str = ""
    """Directory of published weights. Default: `/dev/shm`, or the temporary directory where
    there is none."""
