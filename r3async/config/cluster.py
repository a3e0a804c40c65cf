"""The configuration section `cluster`."""

from __future__ import annotations

from r3async.config.section import PositiveFloat, PositiveInt, Section


class ClusterConfig(Section):
    address: str = ""
    """Address of a Ray cluster. Empty: the one in RAY_ADDRESS, else a local one is started."""
    gpu_gib: PositiveFloat = 79.0
    """Memory of one GPU in GiB as CUDA reports it, which `--dry-run` and `r3async cluster`
    calculate with. Cards of 80 GB have 79.1 to 79.6, an H200 of 141 GB has 139.8."""
    gpus_per_node: PositiveInt = 8
    """GPUs of one host, which `--dry-run` calculates with. Tensor-parallel ranks are on one host,
    and so is each engine."""
    wait_seconds: PositiveFloat = 10.0
    """Seconds that a run waits for GPUs and CPUs that others use, before it ends with a list
    of what is free."""
    interface: str = ""
    """Network interface (`eth0`) over which the learner's ranks meet, and NCCL and gloo move
    tensors. Empty: the one by which Ray knows a host."""
