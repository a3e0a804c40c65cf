"""Extensions of vLLM's worker: loading and comparing weights, recording supports, and sending weights over NCCL."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
import xxhash
import zmq
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from r3async.rollout.activations import ActivationRecorder
from r3async.rollout.vllm.core import (
    find_tied_modules,
    repack_cpu_experts,
    repack_cpu_tied_layers,
)
from r3async.rollout.vllm.load_plan import LoadPlan, LoadRecorder
from r3async.untrusted import decode_msgpack
from r3async.weights.manifest import TensorMismatch, WeightError, WeightManifest
from r3async.weights.nccl import (
    Send,
    Sent,
    Up,
    decode_nccl_message,
    encode_nccl_message,
    listen_at,
    open_nccl_socket,
    request_receive_offer,
)
from r3async.weights.version_file import VersionFile, iter_verified_tensors, map_file_privately
from r3async.world.kept_programs import exit_with_owner

# The worker extension, which installs published weights inside vLLM's worker processes.
#
# vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name. Everything
# that crosses the process boundary is bytes, numbers or strings.


logger = logging.getLogger(__name__)


def find_unfilled_modules(model: torch.nn.Module) -> list[str]:
    """Return the modules with weights for which vLLM's loader, in the middle of a reload, got no tensors."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return [
        name
        for name, module in model.named_modules()
        if (info := get_layerwise_info(module)).can_load()
        and not is_deferred_attention_layer(module)
        and any(True for _ in module.parameters(recurse=False))
        and info.load_numel <= 0
    ]


@contextlib.contextmanager
def check_all_loaded(model: torch.nn.Module, published: WeightManifest) -> Iterator[None]:
    """Check that vLLM, inside the block, loads a published version completely.

    It may call the model's `load_weights` once or several times. At the end of the block, raises `WeightError` for a
    tensor that the model did not get, or for a module that was not filled.
    """
    load, given = model.load_weights, set()
    empty: list[str] = []
    tied = {id(module) for module in find_tied_modules(model)}

    def record_names(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            given.add(name)
            yield name, tensor

    def load_and_check(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = load(record_names(weights))
        # vLLM only logs that these modules keep their old weights.
        modules = dict(model.named_modules(remove_duplicate=False))
        empty[:] = [name for name in find_unfilled_modules(model) if id(modules.get(name)) not in tied]
        return loaded

    model.load_weights = load_and_check
    try:
        yield
    finally:
        del model.load_weights
    where = f"weights version {published.version}"
    if missing := sorted(set(published.tensors) - given):
        raise WeightError(f"{where}: tensor {missing[0]!r} was not loaded ({len(missing)} in all)")
    if empty:
        raise WeightError(f"{where}: vLLM's loader left out {empty[0]!r} ({len(empty)} in all)")


class WorkerExtension:
    """The methods that `VllmEngine` calls on every worker."""

    r3_installed = (-1, 0)
    """Version and digest of the contents that were last installed completely; (-1, 0) if there are none."""
    r3_nccl_link = ""
    """Name of the NCCL group that this worker has joined; "" if none."""
    r3_load_plan: LoadPlan | None = None
    """Plan that loads files with the same header as the last one; None if there is none."""
    r3_activations: ActivationRecorder | None = None
    """Recorder of the model's activations while it is active."""
    weight_transfer_engine: Any
    """Weight transfer engine of vLLM's worker."""

    def r3_process_id(self) -> int:
        """Return the pid of the worker's process."""
        return os.getpid()

    def r3_gpu_uuid(self) -> str:
        """Return the uuid of the worker's GPU; empty on CPU."""
        device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def r3_record_sampling_masks(self) -> None:
        """Make the sampler record, from now on, which tokens could be sampled."""
        record_sampling_masks(self.model_runner)  # type: ignore[attr-defined]

    def r3_install_version(self, manifest: bytes) -> tuple[int, int]:
        """Load the published weights of a msgpack-encoded `WeightManifest` in place and return `r3_installed`.

        The owner has verified the same file before it paused the engine, so only its header is compared again, with the
        plan's. For weights from a `source`, names, shapes and dtypes are compared. Raises `WeightError` for a
        difference in those, for a tensor that vLLM's loader did not get and for a module that the loader did not fill,
        or whatever the loader raises. The model then holds neither version and must not be run.
        """
        published = decode_msgpack(manifest, WeightManifest)
        self.r3_installed = (-1, 0)
        if published.source is None:
            with self.r3_use_vllm_config():
                self.r3_load_file(published)
        else:
            self.r3_receive_tensors(published)
            self.r3_finish_load()
        self.r3_installed = published.version, published.digest
        return self.r3_installed

    def r3_use_vllm_config(self) -> contextlib.AbstractContextManager[None]:
        """Set vLLM's current configuration inside a block: some layers ask for it when they process weights."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)  # type: ignore[attr-defined]

    def r3_map_file(self, published: WeightManifest) -> torch.Tensor:
        """Return the memory-mapped file of a version, uint8 `[n]`."""
        return map_file_privately(published.path)

    def r3_load_file(self, published: WeightManifest) -> None:
        """Load a published file by the plan.

        Without a plan for its header, load it with vLLM's loader and build the plan.
        """
        content = self.r3_map_file(published)
        if self.r3_load_plan is not None and self.r3_load_plan.can_load(content):
            self.r3_load_plan.load_file(content)
            self.r3_finish_load()
            return
        self.r3_load_plan = None
        file = VersionFile(published, content)
        watch = LoadRecorder(file.data)
        with watch:
            self.r3_reload_tensors(published, file.iter_tensors())
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        if not watch.is_repeatable(model):
            return
        plan = LoadPlan(model, self.model_config.dtype, file.header, watch.module_loads)  # type: ignore[attr-defined]
        if self.r3_is_plan_exact(plan, content):
            self.r3_load_plan = plan
        else:
            self.r3_reload_tensors(published, file.iter_tensors())

    def r3_is_plan_exact(self, plan: LoadPlan, content: torch.Tensor) -> bool:
        """Return True if the plan reproduces what vLLM's loader just loaded, to the bit.

        The comparison includes padding and packed weights.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        before = digest_parameters(model)
        plan.load_file(content, poison=True)
        self.r3_finish_load()
        wrong = sorted(name for name, digest in digest_parameters(model).items() if before.get(name) != digest)
        if wrong:
            logger.warning("every version is loaded as vLLM does it: the plan gives another %s", wrong[0])
        return not wrong

    def r3_reload_tensors(self, published: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have vLLM load the tensors, in the layout of its first load, and check that nothing was left out."""
        runner = self.model_runner  # type: ignore[attr-defined]
        with check_all_loaded(runner.get_model(), published):
            runner.reload_weights(weights_iterator=tensors)
        self.r3_finish_load()

    def r3_receive_tensors(self, published: WeightManifest) -> None:
        """Load tensors received over vLLM's NCCL group, which is joined first if it is new; see `weights.nccl`.

        Blocks until all tensors have arrived. If the sender is lost on the way, this never returns: the owner's wait
        times out after `weights.install_timeout`, and it ends the engine.
        """
        engine = self.r3_get_transfer_engine()
        p = engine.parallel_config
        workers = p.world_size * p.data_parallel_size
        offer = request_receive_offer(published, p.data_parallel_index * p.world_size + p.rank, workers)
        if offer.link != self.r3_nccl_link:
            self.r3_nccl_link = ""
            self.init_weight_transfer_engine(  # type: ignore[attr-defined]
                {
                    "master_address": offer.host,
                    "master_port": offer.port,
                    "rank_offset": 1,
                    "world_size": workers + 1,
                    "packed": True,
                    "packed_buffer_size_bytes": offer.bucket_bytes,
                }
            )
            check_nccl_group(engine)
            self.r3_nccl_link = offer.link
        widths = {name: getattr(torch, entry.dtype).itemsize for name, entry in published.tensors.items()}
        entries = [(name, published.tensors[name]) for name in order_tensor_names(widths)]
        with check_all_loaded(engine.model, published):
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights(  # type: ignore[attr-defined]
                {
                    "names": [name for name, _ in entries],
                    "dtype_names": [entry.dtype for _, entry in entries],
                    "shapes": [list(entry.shape) for _, entry in entries],
                }
            )
            self.finish_weight_update()  # type: ignore[attr-defined]

    def r3_get_transfer_engine(self) -> Any:
        """Return vLLM's receiving end, created as `weight_transfer_config` would have done at the start."""
        if self.weight_transfer_engine is None:
            from vllm.config import WeightTransferConfig
            from vllm.distributed.weight_transfer import WeightTransferEngineFactory

            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="nccl"),
                self.vllm_config,  # type: ignore[attr-defined]
                self.device,  # type: ignore[attr-defined]
                self.model_runner.get_model(),  # type: ignore[attr-defined]
            )
        return self.weight_transfer_engine

    def r3_finish_load(self) -> None:
        """Complete the steps that vLLM itself leaves undone after a reload."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        repack_cpu_experts(model)
        repack_cpu_tied_layers(model)

    def r3_find_weight_differences(self, manifest: bytes) -> bytes:
        """Return the msgpack-encoded result of `find_model_differences`."""
        published = decode_msgpack(manifest, WeightManifest)
        runner = self.model_runner  # type: ignore[attr-defined]

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            runner.reload_weights(weights_iterator=tensors)
            self.r3_finish_load()

        with self.r3_use_vllm_config():
            return msgspec.msgpack.encode(find_model_differences(runner.get_model(), published, load))

    def r3_record_activations(self) -> None:
        """Record the model's activations, stage by stage, until `r3_save_activations`."""
        self.r3_activations = ActivationRecorder(self.model_runner.get_model())  # type: ignore[attr-defined]

    def r3_save_activations(self, path: str) -> str:
        """Write the activations to a safetensors file and return the dtype of the computation.

        Only the first worker writes.
        """
        from safetensors.torch import save_file

        stages, self.r3_activations = self.r3_activations, None
        if stages is None:
            return ""
        seen = stages.finish_recording()
        if self.rank == 0:  # type: ignore[attr-defined]
            save_file(seen, path)
        return stages.dtype


def digest_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Return the XXH3 digest of each parameter's contents."""
    return {
        name: xxhash.xxh3_64_intdigest(view_as_integers(held.cpu()).numpy())
        for name, held in iter_parameter_contents(model)
    }


# Recording of supports by the sampler of vLLM's first model runner, as bits beside the sampled token.
#
# The second model runner records ids itself, but needs Triton. Log-probs after top-k, top-p and min-p are minus
# infinity for tokens that cannot be sampled. So a row of `logprob_token_ids`, which has the sampled token first, gets a
# bit for each token of the vocabulary behind it: all rows have one shape, nothing waits for the device, and the bits
# travel wherever log-probs do.


WORD_BITS = 32


def pack_bits(allowed: Tensor) -> Tensor:
    """Pack bool `[B, V]` into int32 `[B, ceil(V / 32)]`, the lowest bit of the lowest byte first."""
    extra = -allowed.shape[1] % WORD_BITS
    lanes = torch.nn.functional.pad(allowed, (0, extra)).view(len(allowed), -1, 8).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=allowed.device)
    return (lanes << shifts).sum(dim=-1, dtype=torch.uint8).view(torch.int32)


class MaskRecordingSampler(Sampler):
    """A sampler that adds the bits of each row's support to the output of vLLM's sampler."""

    _processed_logprobs: Tensor | None = None

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled, self._processed_logprobs = super().sample(*args, **kwargs)
        return sampled, self._processed_logprobs

    def forward(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        output = super().forward(*args, **kwargs)
        processed, self._processed_logprobs = self._processed_logprobs, None
        tensors = output.logprobs_tensors
        if processed is not None and tensors is not None:
            ids = torch.cat([tensors.logprob_token_ids, pack_bits(processed > -torch.inf)], dim=1)
            output.logprobs_tensors = tensors._replace(logprob_token_ids=ids)
        return output


def record_sampling_masks(runner: Any) -> None:
    """Replace the sampler of a first model runner. The second one has its own from the start."""
    old = runner.sampler
    if isinstance(old, Sampler):
        runner.sampler = MaskRecordingSampler(old.logprobs_mode, old.use_fp64_gumbel)


# Comparison of the weights in a vLLM model with the published tensors.


NamedTensors = Iterable[tuple[str, torch.Tensor]]
_TAG_BASE = 128
"""Base of the digits in which tags are written: every floating-point dtype of weights represents 1 to 128 exactly,
except float8."""


def find_model_differences(
    model: torch.nn.Module, published: WeightManifest, load_tensors: Callable[[NamedTensors], None]
) -> list[TensorMismatch]:
    """Return the published tensors that the model does not hold as they were published, in the manifest's order.

    vLLM fuses, splits and re-packs the tensors that it loads, which loses their names. So the model's parameters are
    compared with those after a regular load of the same file by `load_tensors`. To name the elements that differ, the
    loader then gets tags instead of weights: whatever it does with the tensors, it does with the tags too.

    The list is empty if the model holds exactly the loaded weights: then either they are correct, or every load goes
    wrong in the same way. Afterwards the model holds the result of `load_tensors`. Needs host memory for one copy of
    the model.
    """
    held = {name: tensor.to("cpu", copy=True) for name, tensor in iter_parameter_contents(model)}
    load_tensors(iter_verified_tensors(published))
    wrong = {}
    for name, tensor in iter_parameter_contents(model):
        now, before = tensor.cpu(), held.pop(name)
        if before.shape != now.shape:
            wrong[name] = torch.ones(now.shape, dtype=torch.bool)
        elif (different := view_as_integers(before) != view_as_integers(now)).any():
            wrong[name] = different.reshape(now.shape)
    if not wrong:
        return []
    tags = {name: torch.zeros(different.shape, dtype=torch.int64) for name, different in wrong.items()}
    tagged = {name: torch.ones(different.shape, dtype=torch.bool) for name, different in wrong.items()}
    place = 1
    while place <= len(published.tensors):
        load_tensors(_iter_tag_tensors(published, place))
        for name, tensor in iter_parameter_contents(model):
            if name not in wrong:
                continue
            digits = tensor.cpu().to(torch.int64)
            tagged[name] &= (digits >= 1) & (digits <= _TAG_BASE)  # not padding
            tags[name] += (digits - 1) * place
        place *= _TAG_BASE
    load_tensors(iter_verified_tensors(published))
    names = list(published.tensors)
    found: dict[int, TensorMismatch] = {}
    for parameter_name, different in wrong.items():
        which, counts = tags[parameter_name][different & tagged[parameter_name]].unique(return_counts=True)
        for tag, count in zip(which.tolist(), counts.tolist(), strict=True):
            if tag < len(names):
                found[tag] = TensorMismatch(names[tag], parameter_name, count)
    return [found[tag] for tag in sorted(found)]


def iter_parameter_contents(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and contents of each parameter.

    On CPU vLLM passes the weights of dense layers to oneDNN and empties the parameter. The layer's output for the unit
    vectors equals oneDNN's weights, to the bit.
    """
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            held = parameter.detach()
            if not held.numel() and hasattr(module, "cpu_linear"):
                widths = ("input_size_per_partition", "input_size", "embedding_dim")
                width = next(getattr(module, w) for w in widths if hasattr(module, w))
                held = module.cpu_linear(torch.eye(width, dtype=held.dtype), parameter, None).T
            yield f"{owner}.{name}", held


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers, flattened, so that NaN equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(sizes[tensor.element_size()])


def _iter_tag_tensors(published: WeightManifest, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the published shapes, each filled with one digit (plus 1) of its index."""
    for index, (name, entry) in enumerate(published.tensors.items()):
        yield name, torch.full(entry.shape, index // place % _TAG_BASE + 1, dtype=getattr(torch, entry.dtype))


# The process that sends weights from the learner's GPU to one generator's workers; see `weights.nccl`.
#
# vLLM's own trainer engine does the sending, in the wire format that vLLM's workers receive. It could also drive the
# workers, but here the generator does that, between pause and resume.


POLL_MILLISECONDS = 60_000

SendVersion = Callable[[Send], None]
"""Function that sends one version and returns when all workers have it."""


def main() -> None:
    """Run a sending process.

    Its arguments after `sys.path` are the endpoint that gives work, the link's name, and the owner's process id.
    """
    endpoint, link, owner = sys.argv[2:]
    exit_with_owner(int(owner))
    serve_sends(endpoint, link, make_nccl_sender())


def serve_sends(endpoint: str, link: str, send_version: SendVersion, stop: Callable[[], bool] = lambda: False) -> None:
    """Send the requested versions until `stop` returns True, or until an error.

    A failed operation leaves no group that could be used again.
    """
    with zmq.Context() as context, open_nccl_socket(context, zmq.DEALER, endpoint) as dealer:
        dealer.linger = 1000
        dealer.connect(endpoint)
        dealer.send(encode_nccl_message(Up(link)))
        while not stop():
            if dealer.poll(POLL_MILLISECONDS):
                job = decode_nccl_message(dealer.recv())
                assert isinstance(job, Send)
                send_version(job)
                dealer.send(encode_nccl_message(Sent(link, job.version)))


def order_tensor_names(widths: Mapping[str, int]) -> list[str]:
    """Return the order in which tensors are sent, as sender and workers know the names in different orders.

    `widths` has the bytes per element of each tensor. The widest come first: vLLM packs tensors one behind the other,
    and each must begin at an offset that its elements allow.
    """
    return sorted(widths, key=lambda name: (-widths[name], name))


def make_nccl_sender() -> SendVersion:
    """Return a function that sends over vLLM's NCCL group, on this process's first GPU.

    The first `Send` creates the group and waits for all workers to join. Raises `RuntimeError` without CUDA.
    """
    if not torch.cuda.is_available():
        raise RuntimeError('weights.backend="nccl" needs CUDA where the learner is')
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    class MappedWeights(WeightSource):
        """A file of published weights."""

        def __init__(self) -> None:
            self.tensors: dict[str, torch.Tensor] = {}

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors.items():
                yield name, tensor.to("cuda")

    source, trainers = MappedWeights(), list[NCCLTrainerWeightTransferEngine]()

    def send_version(job: Send) -> None:
        source.tensors = read_tensors(job.path)
        if not trainers:
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=job.host,
                master_port=job.port,
                world_size=job.workers + 1,
                packed_buffer_size_bytes=job.bucket_bytes,
            )
            with listen_for_workers(job.host, job.port):
                trainers.append(
                    NCCLTrainerWeightTransferEngine.trainer_init(info, client=_PassiveWorkerClient(), source=source)
                )
            check_nccl_group(trainers[0])
        trainers[0].send_weights()
        source.tensors = {}

    return send_version


@contextlib.contextmanager
def listen_for_workers(host: str, port: int) -> Iterator[None]:
    """Have the group that is created inside this block listen at `host`, of IPv4 or IPv6.

    vLLM 0.30 listens on IPv4 alone, unless it is handed a socket.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    create = StatelessProcessGroup.create
    listening = partial(create, listen_socket=listen_at(host, port))
    StatelessProcessGroup.create = staticmethod(listening)
    try:
        yield
    finally:
        StatelessProcessGroup.create = staticmethod(create)


def check_nccl_group(engine: Any) -> None:
    """Raise `WeightError` if vLLM could not load NCCL: its broadcasts would do nothing, without an error."""
    if getattr(engine.model_update_group, "disabled", True):
        raise WeightError('weights.backend="nccl": vLLM cannot use NCCL here (is VLLM_DISABLE_PYNCCL set?)')


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, memory-mapped, in the order in which they are sent."""
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: tensors[name] for name in order_tensor_names({name: t.itemsize for name, t in tensors.items()})}


class _PassiveWorkerClient:
    """A client that does nothing, because the generator drives its workers and not this process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
