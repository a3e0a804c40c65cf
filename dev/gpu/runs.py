"""`python -m dev.gpu.runs DEVICE PLAN OUT`: learners on the emulated device, or on the CPU, and the
facts that both must share.

A plan is a list of cases in JSON. The process imports torch and the backends once, and forks the
ranks of each case. What a rank found is in `OUT/NAME-RANK.npz`, to be compared bit by bit; what its
device had to do is in `OUT/NAME-RANK.json`. If a rank fails, the others are killed, and its
traceback is in `OUT/NAME-RANK.log`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

    from r3async.learner.backend import LearnerBackend
    from r3async.learner.micro_batches import MicroBatch

DeviceName = Literal["emulated", "cpu"]
LENGTHS = (9, 60, 33, 100, 64, 77, 5, 90)
BUDGET = 160
SECONDS = 120.0
"""Time that the ranks of one case may take."""
SMALL_MODEL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learner, and what is done with it.

    Attributes:
        learner: The settings of `learner` that are not the defaults.
        layers: The layers of the model.
        task: `facts` trains, scores, exports, saves and restores; `counts` trains minibatches of
            one and of two equal micro-batches, and only counts.
        fault: A fault of `dev.gpu.faults` to plant on the last rank.
    """

    name: str
    learner: dict[str, Any] = {}
    layers: int = 4
    task: Literal["facts", "counts"] = "facts"
    fault: str = ""

    @property
    def num_ranks(self) -> int:
        parallel = self.learner.get("parallel", {})
        return int(
            parallel.get("dp", 1)
            * parallel.get("cp", 1)
            * parallel.get("tp", 1)
            * parallel.get("pp", 1)
        )


def main() -> None:
    device = sys.argv[1]
    plan = Path(sys.argv[2])
    out = Path(sys.argv[3])
    if device not in ("emulated", "cpu"):
        raise SystemExit(f"{device!r} is not a device: emulated or cpu")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    _prepare_process("emulated" if device == "emulated" else "cpu")
    cases = msgspec.json.decode(plan.read_bytes(), type=list[Case])
    failed = [case.name for case in cases if not _run_case(case, out)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see their logs in {out}")


def _prepare_process(device: DeviceName) -> None:
    """Import everything that ranks need. No thread may start here, since the ranks are forked."""
    if device == "emulated":
        from dev.gpu.library import load_library

        load_library()
    import torch

    from dev.gpu.device import compute_as_cuda, install_device

    torch.set_num_threads(1)
    if device == "emulated":
        install_device()
    else:
        compute_as_cuda()
    import r3async.learner.megatron.backend
    import r3async.learner.torch.backend  # noqa: F401


def _run_case(case: Case, out: Path) -> bool:
    """Run a case on as many forked processes as it has ranks. Returns False if one failed."""
    from r3async.tools.gpu_check.place import make_model

    dtype = case.learner.get("dtype", "bfloat16")
    model = make_model(
        out / f"model-{dtype}-{case.layers}",
        dtype,
        0,
        "cpu",
        num_hidden_layers=case.layers,
        **SMALL_MODEL,
    )
    children = {_fork_rank(case, rank, model, out): rank for rank in range(case.num_ranks)}
    good = True
    ends = time.monotonic() + SECONDS
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            good &= status == 0
            del children[pid]
        if not good or time.monotonic() > ends:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return False
        if not pid:
            time.sleep(0.01)
    return good


def _fork_rank(case: Case, rank: int, model: Path, out: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(out / f"{case.name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run_rank(case, rank, model, out)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(case: Case, rank: int, model: Path, out: Path) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from dev.gpu import faults
    from r3async.learner import build_learner
    from r3async.learner.micro_batches import pack_for_ranks
    from r3async.tools.gpu_check.place import make_config, make_samples

    # A forked process makes torch's pool of threads again, which two threads at once do not
    # survive: before there are any.
    torch.set_num_threads(1)
    if case.num_ranks > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.FileStore(str(out / f"{case.name}.store"), case.num_ranks),
            rank=rank,
            world_size=case.num_ranks,
            timeout=datetime.timedelta(seconds=SECONDS),
        )
    if case.fault and rank == case.num_ranks - 1:
        faults.plant_fault(case.fault)
    config = make_config(BUDGET, **{"dtype": "bfloat16", "lr": 1e-2, **case.learner})
    p = config.learner.parallel
    packed = pack_for_ranks(make_samples(1, LENGTHS, model), BUDGET, ranks=p.dp)
    mine = packed[rank // (p.tp * p.cp) % p.dp]
    learner = build_learner(config, model)
    counted = _PartCounts()
    if case.task == "counts":
        for count in (1, 2):
            _train_counted(learner, mine[:1] * count, counted, f"train-{count}")
    else:
        facts: dict[str, Any] = dict(
            _iter_facts(learner, mine, out / f"{case.name}-state", counted)
        )
        np.savez(out / f"{case.name}-{rank}.npz", **facts)
    learner.close()
    (out / f"{case.name}-{rank}.json").write_text(json.dumps(counted.by_part))


def _train_counted(
    learner: LearnerBackend, batches: Sequence[MicroBatch], counted: _PartCounts, part: str
) -> None:
    """Train twice and count the second time: the first one allocates what the optimizer keeps."""
    from r3async.learner.train_step import train_step

    train_step(learner, [batches])
    with counted.part(part):
        train_step(learner, [batches])


def _iter_facts(
    learner: LearnerBackend, batches: Sequence[MicroBatch], state: Path, counted: _PartCounts
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays that depend on every bit of what a learner computes, in
    each of its calls."""
    import numpy as np
    import torch

    from r3async.checkpoint.rank_files import LearnerStateReader, write_rank_file
    from r3async.checkpoint.rank_files import TensorSlice as Slice
    from r3async.learner.train_step import train_step
    from r3async.weights.host_weights import copy_share_to_host, copy_to_host
    from r3async.weights.version_store import VersionStore

    def train(part: str) -> Iterator[tuple[str, np.ndarray]]:
        with counted.part(part):
            result = train_step(learner, [batches], trace=True)[0]
        yield f"{part}/metrics", np.array([value for _, value in sorted(result.metrics.items())])
        yield f"{part}/expert_load", result.expert_load
        for number, trace in enumerate(result.traces):
            yield f"{part}/own/{number}", trace.own
            yield f"{part}/used/{number}", trace.used

    with counted.part("logprobs"):
        yield "logprobs", np.concatenate(learner.logprobs(batches))
    yield "logprobs/own", np.concatenate(learner.logprobs(batches, replay=False))
    yield from train("step-1")
    yield from train("step-2")
    with counted.part("export"):
        weights = learner.export_weights()  # of rank 0 alone
        exported = copy_to_host(weights, None) if weights else {}
    yield from ((f"weights/{name}", tensor.float().numpy()) for name, tensor in exported.items())
    with counted.part("share"):
        share = copy_share_to_host(learner.iter_full_weights, None, 2**20)
    yield from ((f"share/{name}", tensor.float().numpy()) for name, tensor in share.items())
    if exported:
        with VersionStore(state.with_name(f"{state.name}-published")) as store:
            manifest = store.write_tensors(1, exported, torch.bfloat16)
            yield "published", np.frombuffer(Path(manifest.path).read_bytes(), np.uint8)
    if learner.ranks.rank == 0:
        state.mkdir()
    learner.ranks.barrier()
    with counted.part("capture"):
        write_rank_file(state, learner.capture_state())
    learner.ranks.barrier()
    saved = LearnerStateReader(sorted(state.iterdir()))
    for name in sorted(saved.tensor_names()):
        if not name.startswith("rng/"):  # CUDA's are other numbers; nothing draws any
            tensor = saved.read_slice(Slice.full_tensor(name, saved.tensor_shape(name)))
            yield f"state/{name}", tensor.numpy()
    yield from train("step-3")
    learner.restore_state(saved)
    again = dict(train("again-3"))
    yield from again.items()
    yield (
        "routes",
        np.concatenate([m.table["routed_experts"] for m in learner.record_learner_routes(batches)]),
    )
    yield "scores", learner.score_sequence(np.arange(20))


class _PartCounts:
    """Counts of what the device had to do, by part of the program; there are none on the CPU."""

    def __init__(self) -> None:
        self.by_part: dict[str, dict[str, dict[str, int]]] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        from dev.gpu import device

        before = [Counter(each) for each in (device.counts, device.wait_sites)]
        yield
        after = (device.counts, device.wait_sites)
        names = ("counts", "wait_sites")
        self.by_part[name] = {
            n: dict(now - then) for n, now, then in zip(names, after, before, strict=True)
        }


def run_plan(device: DeviceName, cases: Sequence[Case], out: Path) -> Any:
    """Start this program on a plan, and return its process."""
    import subprocess

    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_bytes(msgspec.json.encode(list(cases)))
    command = [sys.executable, "-m", "dev.gpu.runs", device, str(out / "plan.json"), str(out)]
    with (out / "output.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def compare_facts(case: Case, one: Path, other: Path) -> list[str]:
    """Return the names of facts of a case that differ between two directories in any
    bit, rank by rank."""
    import numpy as np

    different = []
    for rank in range(case.num_ranks):
        files = [np.load(path / f"{case.name}-{rank}.npz") for path in (one, other)]
        names = [set(file.files) for file in files]
        different += [
            f"{name} of rank {rank} is on one side only" for name in sorted(names[0] ^ names[1])
        ]
        for name in sorted(names[0] & names[1]):
            a, b = (file[name] for file in files)
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                different.append(f"{name} of rank {rank}")
    return different


def read_counts(case: Case, out: Path, part: str, rank: int = 0) -> Counter[str]:
    """Return what the device had to do in a part of a case."""
    return Counter(json.loads((out / f"{case.name}-{rank}.json").read_text())[part]["counts"])


if __name__ == "__main__":
    main()
