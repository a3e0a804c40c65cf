"""The configuration section `cluster`."""

from __future__ import annotations

from r3async.config.section import PositiveFloat, PositiveInt, Section


class ClusterConfig(Section):
    address: str = ""
    """Address of a Ray cluster. Empty: the one in RAY_ADDRESS, else a local one is started."""
    gpu_gib: PositiveFloat = 79.0
    """Memory of one GPU in GiB as CUDA reports it, used by the plan. Cards of 80 GB have 79.1 to
    79.6, an H200 of 141 GB has 139.8."""
    gpus_per_node: PositiveInt = 8
    """GPUs of one host, used by the plan."""
    wait_seconds: PositiveFloat = 10.0
    """Seconds that a run waits for GPUs and CPUs that others use."""
    interface: str = ""
    """Network interface (`eth0`) for the learner's ranks, NCCL and gloo. Empty: the one by which
    Ray knows a host."""
