"""The worker extension, which installs published weights inside vLLM's worker processes.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by
name. Everything that crosses the process boundary is bytes, numbers or strings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
import xxhash

from r3async.rollout.activations import ActivationRecorder
from r3async.rollout.vllm.cpu_patches import (
    find_tied_modules,
    repack_cpu_experts,
    repack_cpu_tied_layers,
)
from r3async.rollout.vllm.gpt_oss import GptOssTensors, is_gpt_oss
from r3async.rollout.vllm.load_plan import LoadPlan, LoadRecorder
from r3async.rollout.vllm.nccl_sender import check_nccl_group, order_tensor_names
from r3async.rollout.vllm.sampling_masks import record_sampling_masks
from r3async.rollout.vllm.served_adapters import (
    find_adapter_differences,
    install_adapters,
    keep_adapters,
)
from r3async.rollout.vllm.weight_comparison import (
    find_derived_buffers,
    find_model_differences,
    iter_weight_contents,
    view_as_integers,
)
from r3async.untrusted import decode_msgpack
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.weights.nccl import request_receive_offer
from r3async.weights.version_reader import VersionFile, map_file_privately

logger = logging.getLogger(__name__)


def find_unfilled_modules(model: torch.nn.Module) -> list[str]:
    """Return the modules with weights for which vLLM's loader, in the middle of a
    reload, got no tensors."""
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

    It may call the model's `load_weights` once or several times. At the end of the block, raises
    `WeightError` for a tensor that the model did not get, for a module that was not filled, or for
    a buffer that kept what it held of other weights.
    """
    load = model.load_weights
    given = set()
    empty: list[str] = []
    tied = {id(module) for module in find_tied_modules(model)}
    gpt_oss = GptOssTensors() if is_gpt_oss(model) else None
    spoil_derived_buffers(model)

    def record_names(
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            given.add(name)
            yield name, tensor

    def load_and_check(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        named = record_names(weights)
        loaded = load(named if gpt_oss is None else gpt_oss.iter_loadable(named))
        # vLLM only logs that these modules keep their old weights.
        modules = dict(model.named_modules(remove_duplicate=False))
        empty[:] = [
            name for name in find_unfilled_modules(model) if id(modules.get(name)) not in tied
        ]
        return loaded

    model.load_weights = load_and_check
    try:
        yield
    finally:
        del model.load_weights
    filled = set() if gpt_oss is None else gpt_oss.load_sinks(model)
    where = f"weights version {published.version}"
    missing = sorted(set(published.tensors) - given)
    if missing:
        raise WeightError(f"{where}: tensor {missing[0]!r} was not loaded ({len(missing)} in all)")
    left_out = [name for name in empty if name not in filled]
    left_out += [n for n, held in find_derived_buffers(model).items() if bool(held.isnan().any())]
    if left_out:
        raise WeightError(
            f"{where}: vLLM's loader left out {left_out[0]!r} ({len(left_out)} in all)"
        )


def spoil_derived_buffers(model: torch.nn.Module) -> None:
    """Fill the buffers that follow parameters with NaN, which shows later whether they did."""
    for buffer in find_derived_buffers(model).values():
        buffer.detach().fill_(torch.nan)


class WorkerExtension:
    """The methods that `VllmEngine` calls on every worker."""

    r3_installed = (-1, 0)
    """Version and digest of the contents that were last installed completely; (-1, 0)
    if there are none."""
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
        """Load the published weights of a msgpack-encoded `WeightManifest` in place and
        return `r3_installed`.

        The owner has verified the same file before it paused the engine, so only its header is
        compared again, with the plan's. For weights from a `source`, names, shapes and dtypes are
        compared. Raises `WeightError` for a difference in those, for a tensor that vLLM's loader
        did not get and for a module that the loader did not fill, or whatever the loader raises.
        The model then holds neither version and must not be run.
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

    def r3_install_adapters(
        self, manifest: bytes, versions_in_use: list[int]
    ) -> tuple[int, int, float]:
        """Load the adapters of a msgpack-encoded `WeightManifest`; see `install_adapters`.

        Returns the version, its digest, and the seconds that it took. The owner has verified the
        file.
        """
        began = time.perf_counter()
        published = decode_msgpack(manifest, WeightManifest)
        install_adapters(self, published, versions_in_use)
        return published.version, published.digest, time.perf_counter() - began

    def r3_find_adapter_differences(self, manifest: bytes) -> bytes:
        """Return the msgpack-encoded result of `find_adapter_differences`."""
        published = decode_msgpack(manifest, WeightManifest)
        return msgspec.msgpack.encode(find_adapter_differences(self, published))

    def r3_use_vllm_config(self) -> contextlib.AbstractContextManager[None]:
        """Set vLLM's current configuration inside a block: some layers ask for it when they
        process weights."""
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
        before = digest_weights(model)
        spoil_derived_buffers(model)
        plan.load_file(content, poison=True)
        self.r3_finish_load()
        wrong = sorted(
            name for name, digest in digest_weights(model).items() if before.get(name) != digest
        )
        if wrong:
            logger.warning(
                "every version is loaded as vLLM does it: the plan gives another %s", wrong[0]
            )
        return not wrong

    def r3_reload_tensors(
        self, published: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Have vLLM load the tensors, in the layout of its first load, and check that
        nothing was left out."""
        runner = self.model_runner  # type: ignore[attr-defined]
        with check_all_loaded(runner.get_model(), published):
            runner.reload_weights(weights_iterator=tensors)
        self.r3_finish_load()

    def r3_receive_tensors(self, published: WeightManifest) -> None:
        """Load tensors received over vLLM's NCCL group, which is joined first if it is new;
        see `weights.nccl`.

        Blocks until all tensors have arrived. If the sender is lost on the way, this never returns:
        the owner's wait times out after its limit, and it ends the engine.
        """
        engine = self.r3_get_transfer_engine()
        p = engine.parallel_config
        workers = p.world_size * p.data_parallel_size
        offer = request_receive_offer(
            published, p.data_parallel_index * p.world_size + p.rank, workers
        )
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
        widths = {
            name: getattr(torch, entry.dtype).itemsize for name, entry in published.tensors.items()
        }
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
        """Return vLLM's receiving end, created as `weight_transfer_config` would have
        done at the start."""
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
        with self.r3_use_vllm_config(), keep_adapters(runner):
            found = find_model_differences(
                runner.get_model(),
                published,
                lambda tensors: self.r3_reload_tensors(published, tensors),
            )
        return msgspec.msgpack.encode(found)

    def r3_record_activations(self) -> None:
        """Record the model's activations, stage by stage, until `r3_save_activations`."""
        self.r3_activations = ActivationRecorder(self.model_runner.get_model())  # type: ignore[attr-defined]

    def r3_save_activations(self, path: str) -> str:
        """Write the activations to a safetensors file and return the dtype of the computation.

        Only the first worker writes.
        """
        from safetensors.torch import save_file

        stages = self.r3_activations
        self.r3_activations = None
        if stages is None:
            return ""
        seen = stages.finish_recording()
        if self.rank == 0:  # type: ignore[attr-defined]
            save_file(seen, path)
        return stages.dtype


def digest_weights(model: torch.nn.Module) -> dict[str, int]:
    """Return the XXH3 digest of each tensor that a load fills or derives."""
    return {
        name: xxhash.xxh3_64_intdigest(view_as_integers(held.cpu()).numpy())
        for name, held in iter_weight_contents(model)
    }
