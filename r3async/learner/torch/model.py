"""A transformers causal language model over packed samples: loading, checks, log-probs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.integrations import moe
from transformers.modeling_utils import LoadStateDictConfig

from r3async.data.model_shape import ModelShapeError, read_moe_layers
from r3async.data.models import EXPERT_BIAS_SUFFIXES
from r3async.data.supports import SupportSets
from r3async.data.tokens import Sample, TokenTable
from r3async.learner.deterministic_gather import DeterministicGather
from r3async.learner.device_upload import upload_array
from r3async.learner.micro_batches import MicroBatch, collate_samples
from r3async.learner.model import open_model_files
from r3async.learner.packed_attention import AttentionPlan, packed_attention, plan_attention
from r3async.learner.replay import MicroBatchRoutes
from r3async.learner.results import LearnerError
from r3async.learner.stacked_experts import RowGroups, multiply_groups
from r3async.learner.token_logprobs import token_logprobs
from r3async.learner.torch.checkpoint_names import may_be_carried
from r3async.learner.torch.described import (
    first_error_line,
    load_transformers_config,
    read_model_config,
)
from r3async.learner.torch.packed_delta_net import use_packed_delta_rule
from r3async.learner.torch.routers import RouterSearch, check_routers
from r3async.learner.torch.separate_samples import SampleSeparator, find_leaks

TRIAL_LENGTHS = (4, 3)
"""Tokens of the two samples with which a model is tried when it has been loaded."""
ATTENTION_NAME = "r3async_packed"
"""The name of our attention in transformers. No mask function has this name, so
models create no mask."""


def _packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attention_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention over packed samples: `query [1, heads, N, D]` -> `[1, N, heads, D]`.

    This is the attention function that transformers calls. Raises `LearnerError` for what this
    attention does not support, instead of leaving it out.
    """
    name = type(module).__name__
    if attention_plan is None:
        raise LearnerError(
            f"{name} is not handed the keyword arguments of the model, so samples "
            "would see each other"
        )
    extras = {"a mask of its own": attention_mask, "soft-capping": softcap}
    for what, given in extras.items():
        if given is not None:
            raise LearnerError(f"{name} uses {what}, which packed attention does not have")
    if dropout or not getattr(module, "is_causal", True):
        raise LearnerError(
            f"{name} uses {'dropout' if dropout else 'attention that is not causal'}"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window or None
    return packed_attention(q, k, v, attention_plan, scaling, sinks=s_aux, window=window)[
        None
    ], None


AttentionInterface.register(ATTENTION_NAME, _packed_attention_forward)


def _multiply_groups(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply as transformers does, with gradients that are 0 for experts without a row
    on every device."""
    return multiply_groups(input.to(weight.dtype), weight, RowGroups(offs))


moe._grouped_mm = _multiply_groups


def load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model of a Hugging Face directory, in host memory, with every weight from its files.

    It is always in eval mode: dropout and a router's jitter are not part of the policy that the
    engine samples from. Raises `LearnerError`, with what to change, if transformers cannot load it
    or a weight is missing or left over.
    """
    try:
        empty = build_empty_model(path, dtype)
        # Whatever the dtype, expert biases are float32. Not all classes say so (MiniMax-M2's not).
        type(empty)._keep_in_fp32_modules_strict = set(EXPERT_BIAS_SUFFIXES)
        model, info = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict={
                name: file.get_slice(name) for name, file in open_model_files(path).items()
            },
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as error:
        # Many kinds: files, their headers, names, shapes, an unknown model type.
        raise LearnerError(f"transformers cannot load `model.path` = {path}: {error}") from error
    _check_loading(model, path, info)
    model = _prepare_model(model)
    for parameter in model.parameters():
        # Some classes keep routers in float32. Several ranks gather them in `dtype`, versions are
        # published in it, and engines compute with it: one rank does as well.
        parameter.data = parameter.data.to(dtype)
    return model


def _check_loading(model: PreTrainedModel, path: Path, info: Mapping[str, Collection[Any]]) -> None:
    """Raise `LearnerError` if the files of a model have not exactly the tensors that its
    `config.json` means. Those of the parts that are carried may be there."""
    described = read_model_config(path)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info[what]))
        if what == "unexpected_keys":
            names = [name for name in names if not may_be_carried(model, described, name)]
        if names:
            rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise LearnerError(
                f"`model.path` = {path}: the files do not fit config.json, "
                f"{what.replace('_', ' ')}: {', '.join(names[:4])}{rest}"
            )


def _prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in list(model.named_parameters()):
        # A parameter in Ernie 4.5: no gradient reaches it, but the optimizer would make it smaller.
        if name.endswith(EXPERT_BIAS_SUFFIXES):
            owner, _, own_name = name.rpartition(".")
            delattr(model.get_submodule(owner), own_name)
            model.get_submodule(owner).register_buffer(own_name, parameter.detach())
    # With this flag a model collects all router logits; there is no auxiliary loss here.
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    return model.eval()


def build_empty_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a Hugging Face directory without memory for its tensors.

    Raises `LearnerError` if transformers cannot build it.
    """
    loaded = load_transformers_config(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                loaded, dtype=dtype, attn_implementation=ATTENTION_NAME
            )
    except Exception as error:  # many kinds: numbers that do not fit
        raise LearnerError(f"transformers cannot build it: {first_error_line(error)}") from error
    return _prepare_model(model)


def fill_sharded_model(model: PreTrainedModel, path: Path, device: torch.device) -> None:
    """Read this rank's part of a model whose parameters are divided among ranks and
    have no memory yet.

    Only that part is read, one tensor after the other, so that a rank never holds more. Raises
    `LearnerError` like `load_model`.
    """
    files = open_model_files(path)
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
    )
    parts = {name: file.get_slice(name) for name, file in files.items()}
    try:
        info, _ = convert_and_load_state_dict_in_model(model, parts, settings)
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if isinstance(parameter, DTensor) and not parameter.to_local().numel():
                _fill_empty_part(
                    model, name, parameter, device
                )  # what it would be joined from, this rank does not read
                info.missing_keys.discard(name)
                info.conversion_errors.pop(name, None)
        # Ties weights, and computes buffers that no file has.
        model._finalize_model_loading(model, settings, info)
    except Exception as error:  # many kinds, as in `load_model`
        raise LearnerError(f"transformers cannot load `model.path` = {path}: {error}") from error
    _check_loading(model, path, info.to_dict())


MALLOC_MMAP_THRESHOLD = -3
LEAST_MAPPED_BYTES = 2**20
MOST_MAPPED_BYTES = 2**25
"""glibc's number of that parameter of `mallopt`, and the size from which freed blocks are returned
at once: while a model is read, and afterwards. The second is what glibc itself arrives at in a
process that frees large tensors."""


@contextmanager
def return_freed_blocks() -> Iterator[None]:
    """Return freed blocks to the system inside this block, instead of keeping them for later ones
    of the same size.

    A matrix of experts is joined from pieces, one an expert. What was kept of them was as large
    as all that was read: 1,005 MB instead of 458 MB on each of two ranks with 417 MB. Does
    nothing without glibc.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(MALLOC_MMAP_THRESHOLD, LEAST_MAPPED_BYTES)
    try:
        yield
    finally:
        if adjust is not None:
            adjust(MALLOC_MMAP_THRESHOLD, MOST_MAPPED_BYTES)


def _fill_empty_part(
    model: PreTrainedModel, name: str, parameter: DTensor, device: torch.device
) -> None:
    """Give a parameter memory of which this rank has no rows."""
    part = DTensor.from_local(
        torch.empty_like(parameter.to_local(), device=device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    owner, _, own_name = name.rpartition(".")
    setattr(
        model.get_submodule(owner),
        own_name,
        nn.Parameter(part, requires_grad=parameter.requires_grad),
    )


@dataclass(frozen=True)
class PackedInputs:
    """The inputs of a forward pass, on the device. `token_ids` and `positions` are int64 `[N]`."""

    token_ids: Tensor
    positions: Tensor
    attention_plan: AttentionPlan

    @staticmethod
    def from_micro_batch(micro_batch: MicroBatch, device: torch.device) -> PackedInputs:
        m = micro_batch
        ids, at = (
            upload_array(x.astype(np.int64), device) for x in (m.table["token_ids"], m.positions)
        )
        return PackedInputs(ids, at, plan_attention(m.cu_seqlens, device, m.prefixes))

    def to_model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of a transformers model."""
        return {
            "input_ids": self.token_ids[None],
            "position_ids": self.positions[None],
            "attention_plan": self.attention_plan,
            "use_cache": False,
        }


class PackedModel(nn.Module):
    """Log-probs of tokens under a transformers model: the whole pass is one `forward`,
    which FSDP shards.

    `routing` and `routers` are the routes' shape and the modules that choose experts, in layer
    order; None and empty for a dense model, and before `find_routers`. Raises `LearnerError` for a
    model that this backend would train wrongly.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, config: Mapping[str, Any], max_total_tokens: int
    ):
        super().__init__()
        self.causal_lm = causal_lm
        self.published_names: Mapping[str, str] = {}
        """Names of the checkpoint's tensors for which transformers has other ones, by these."""
        self.entropy_gradient = False
        """True if the loss has an entropy term."""
        self.float32_head = True
        """True if logits are float32 sums (`model.head_dtype`)."""
        self.logit_scale = 1.0
        """Factor of the output layer's logits. Known after `find_routers`."""
        layers = getattr(causal_lm.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(
            causal_lm.get_output_embeddings(), nn.Linear
        ):
            raise LearnerError(
                f"{type(causal_lm).__name__} has no list of decoder layers, or no "
                "linear output layer"
            )
        self.layers = list(layers)
        self.vocab_size: int = causal_lm.get_output_embeddings().weight.shape[0]
        try:
            self.routing, moe_layers = read_moe_layers(config)
        except ModelShapeError as error:
            raise LearnerError(str(error)) from error
        _check_length_independence(causal_lm.config, max_total_tokens)
        self.routers: list[nn.Module] = []
        self._moe_layers = moe_layers
        self._separator = SampleSeparator(causal_lm.base_model)
        self._delta_nets = use_packed_delta_rule(causal_lm)

    @property
    def keeps_state(self) -> bool:
        """True if some layers keep a state, in which samples cannot share a prefix. Known after
        `find_routers`."""
        return bool(self._delta_nets or self._separator.modules)

    def find_routers(self, device: torch.device) -> None:
        """Run two short samples on `device` to see what the model does, keep them apart where it
        would mix them, and find `routers`.

        With ranks that share the model, this is collective. Raises `LearnerError` for a model that
        this backend would train wrongly; see `_trial_forward`.
        """
        self._separate_samples(device)
        found = self._trial_forward(device)
        if isinstance(self, FSDPModule):
            self.reset_iter_state()  # frees what was gathered
        self.routers = [] if found is None else check_routers(found, self.routing, self._moe_layers)

    def _separate_samples(self, device: torch.device) -> None:
        """Keep samples apart in layers that would mix them. Nothing is found in a model whose
        tensors have no values. Raises `LearnerError` for a layer in which that fails."""
        if self.causal_lm.get_output_embeddings().weight.is_meta:
            return
        mixing = self._find_leaks(device)
        for module in mixing:
            if module not in self.layers:
                self._separator.separate(module)
        if not mixing:
            return
        for module in self._find_leaks(device):
            if module in self.layers:
                raise LearnerError(
                    f"layer {self.layers.index(module)} of {type(self.causal_lm).__name__} mixes "
                    "the samples of a micro-batch, also when its parts are given one sample a row"
                )

    @torch.no_grad()
    def _find_leaks(self, device: torch.device) -> list[nn.Module]:
        """Run two short samples, and return the modules that mix them. A forward pass to FSDP."""
        packed = self._pack_trial_samples(device)
        with find_leaks(self.layers, TRIAL_LENGTHS[0]) as leaking:
            self._run_trial(packed)
        return leaking

    def _pack_trial_samples(self, device: torch.device) -> PackedInputs:
        samples = [
            Sample(f"probe {length}", TokenTable.from_tokens(np.arange(length) % self.vocab_size))
            for length in TRIAL_LENGTHS
        ]
        return PackedInputs.from_micro_batch(collate_samples(samples), device)

    def _run_trial(self, packed: PackedInputs) -> Tensor:
        """Return the logits `[1, N, vocabulary]`. Raises `LearnerError` if the model cannot run."""
        try:
            logits: Tensor = self.causal_lm(**packed.to_model_inputs()).logits
        except LearnerError:
            raise
        except Exception as error:  # whatever a model's own code may raise
            raise LearnerError(
                f"{type(self.causal_lm).__name__} cannot run on packed samples: {error}"
            ) from error
        return logits

    @torch.no_grad()
    def _trial_forward(self, device: torch.device) -> dict[int, list[nn.Module]] | None:
        """Run two short samples, and return the modules that choose experts, by layer. A
        forward pass to FSDP.

        For a model whose tensors have no values, this checks only what its code does with shapes;
        returns None if it cannot run.

        Raises `LearnerError` if the logits are not the output layer's (they are capped), or if a
        router takes weights from masked scores.
        """
        shapes_only = self.causal_lm.get_output_embeddings().weight.is_meta
        hidden: list[Tensor] = []
        handle = self.causal_lm.base_model.register_forward_hook(
            lambda m, i, out: hidden.append(out.last_hidden_state)
        )
        try:
            with RouterSearch(self.layers, self.routing) as search:
                logits = self._run_trial(self._pack_trial_samples(device))
        except LearnerError as error:
            if shapes_only and error.__cause__ is not None:
                return None
            raise
        finally:
            handle.remove()
        if shapes_only:
            return search.routers
        if not torch.isfinite(logits).all():
            raise LearnerError(
                f"{type(next(iter(search.grouped_routers))).__name__} takes gate weights from "
                "scores in which some groups of experts are masked: recorded experts of the other "
                "groups could not be replayed"
                if search.grouped_routers
                else (
                    f"{type(self.causal_lm).__name__} gives logits that are not finite: its "
                    "weights are broken"
                )
            )
        self.logit_scale = _find_logit_scale(self.causal_lm, hidden[0], logits)
        return search.routers

    def forward(
        self,
        packed: PackedInputs,
        targets: Tensor,
        before: DeterministicGather,
        temperatures: Tensor,
        routes: MicroBatchRoutes | None = None,
        supports: SupportSets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of `targets`, float32 `[M]`, and their entropies.

        Args:
            targets: int64 `[M]`: tokens that follow another in their sample, or could.
            before: Gathers the tokens before them; logits are computed for these only.
            temperatures: float32 `[M]`.
            routes: The routes bound for this pass.
            supports: The supports of these tokens.
        """
        hidden = self.causal_lm.base_model(**packed.to_model_inputs()).last_hidden_state[0]
        if routes is not None:
            hidden = routes.track_backward(hidden)
        head = self.causal_lm.get_output_embeddings()
        logprobs, entropies = token_logprobs(
            head.weight,
            before(hidden),
            targets,
            temperatures / self.logit_scale,
            bias=head.bias,
            entropy_gradient=self.entropy_gradient,
            supports=supports,
            float32_head=self.float32_head,
        )
        # A view of all logits, about which FSDP warns: changed in place, it would lose FSDP's hook.
        return logprobs.clone(), entropies

    def find_expert_biases(self) -> list[tuple[str, Tensor]]:
        """Return the expert biases of each router: the name, and float32 `[experts]`. Empty if a
        router has none.

        Experts are chosen by their scores and these biases.
        """
        named = {
            id(buffer): (name, buffer.view(-1))
            for name, buffer in self.causal_lm.named_buffers()
            if name.endswith(EXPERT_BIAS_SUFFIXES)
        }
        found = [
            [named[id(b)] for b in router.buffers() if id(b) in named] for router in self.routers
        ]
        return [one for (one,) in found] if all(len(some) == 1 for some in found) else []

    def enable_recompute(self, granularity: str) -> None:
        """Recompute activations in the backward pass: of MoE blocks (`selective`), of whole layers
        (`full`), or none."""
        blocks = (
            c
            for layer in self.layers
            for c in layer.children()
            if any(r in c.modules() for r in self.routers)
        )
        for module in {"none": (), "selective": blocks, "full": self.layers}[granularity]:
            # As in transformers' own layers: within `forward`, so that FSDP's hooks run once.
            module.forward = partial(_forward_with_recompute, module.forward)

    def _list_exported(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, torch.dtype]]:
        """Return parameters and persistent buffers, by our names, with the dtype in which
        they are exported."""
        ours = {name: (tensor, dtype) for name, tensor in self.causal_lm.named_parameters()}
        buffers = dict(self.causal_lm.named_buffers())
        return ours | {
            n: (buffers[n], buffers[n].dtype) for n in self.causal_lm.state_dict() if n in buffers
        }

    def group_names_by_layer(self) -> list[set[str]]:
        """Return our names of exported tensors, layer by layer, with those that belong to no
        layer in one group."""
        layers: dict[str, set[str]] = {}
        for name in self._list_exported(torch.float32):
            number = next((part for part in name.split(".") if part.isdigit()), "")
            layers.setdefault(number, set()).add(name)
        return list(layers.values())

    def collect_checkpoint_tensors(
        self,
        gather: Callable[[Tensor, torch.dtype], Tensor | None],
        dtype: torch.dtype,
        *,
        copy: bool = True,
        names: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Return all weights in `dtype`, and persistent buffers as they are, by their
        checkpoint names.

        Buffers keep their dtype because what a router adds to its scores is float32 in any
        model. The tensors are contiguous copies; without `copy` they may be views, and need
        not be contiguous.

        Args:
            gather: Returns a whole tensor for one of ours, or None on a rank that
                does not export it.
            names: Our names of the tensors, if not all.
        """
        ours = {
            n: each for n, each in self._list_exported(dtype).items() if names is None or n in names
        }
        whole = {
            name: t
            for name, (tensor, of) in ours.items()
            if (t := gather(tensor.detach(), of)) is not None
        }
        named = {
            self.published_names.get(name, name): tensor
            for name, tensor in revert_weight_conversion(self.causal_lm, whole).items()
        }
        if not copy:
            return named
        return {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in named.items()
        }


def _forward_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


LOGIT_SCALE_KEYS = {"logits_scaling": -1, "lm_head_multiplier": 1, "logit_scale": 1}
"""Keys of a configuration for a factor of the logits, each with its power: Granite's divides."""


def _find_logit_scale(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> float:
    """Return the factor between the output layer's logits and the model's. Raises `LearnerError` if
    they differ by anything else."""
    scale = 1.0
    for key, power in LOGIT_SCALE_KEYS.items():
        scale *= float(getattr(model.config, key, None) or 1.0) ** power
    own = model.get_output_embeddings()(hidden).float()
    exact = scale == 1.0 and torch.equal(own, logits.float())
    rounding = 2 * torch.finfo(logits.dtype).eps
    if exact or (scale != 1.0 and torch.allclose(own * scale, logits.float(), rtol=rounding)):
        return scale
    raise LearnerError(
        f"{type(model).__name__} changes its logits after the output layer (soft-capping, or a "
        f"factor that is none of {', '.join(LOGIT_SCALE_KEYS)})"
    )


def _check_length_independence(config: Any, max_total_tokens: int) -> None:
    """Raise `LearnerError` for rotary positions that change with the length of the input, and for
    chunked attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        kind = parameters.get("rope_type") if isinstance(parameters, Mapping) else None
        if kind in ("dynamic", "longrope"):
            raise LearnerError(
                f"rope_type {kind!r} depends on the length of the input, which is that of a whole "
                "micro-batch here: only rotary positions that do not are supported (default, "
                "linear, yarn, llama3)"
            )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_total_tokens:
        raise LearnerError(
            f"attention in chunks of {chunk} tokens is not supported: lower "
            "episode.max_total_tokens to that"
        )
