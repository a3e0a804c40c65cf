"""What a plan says of weights, gradients and optimizer, of each preset, against its learner of full size without memory."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from r3async.config import Config, load_config
from r3async.data.model_shape import parse_model_shape
from r3async.tools.memory import PUBLISHED_CONFIGS, estimate_rank_memory, find_model_shape
from r3async.tools.presets import list_preset_paths
from r3async.tools.traffic import count_copy_bytes
from tests.helpers import architectures
from tests.helpers.unheld import local, megatron_rank, torch_rank, updated

LAYERS_WITH_ADAPTERS = 4
"""Of a model with adapters: those of one layer of experts are some hundred tensors, and all layers are alike."""


def described(config: Config, directory: Path) -> Config:
    """The configuration with a model at `directory`, of which there is the `config.json`."""
    directory.mkdir()
    if config.model.path:
        numbers = dict(PUBLISHED_CONFIGS[Path(config.model.path).name])
        numbers = numbers.get("text_config", numbers)  # what is trained
        if config.learner.lora.rank:
            numbers["num_hidden_layers"] = LAYERS_WITH_ADAPTERS
        (directory / "config.json").write_text(json.dumps(numbers))
    else:
        from r3async.tools.init_model import build_byte_tokenizer, build_random_model

        build_random_model(config.model.init, build_byte_tokenizer()).config.save_pretrained(directory)
    before = find_model_shape(config)[0]
    config.model.path = str(directory)
    if not config.learner.lora.rank:
        assert find_model_shape(config)[0].num_parameters == before.num_parameters
    return config


def stages(config: Config) -> list[int]:
    """The first rank of the first two pipeline stages, for all between the first and the last are alike, and the last rank."""
    p = config.learner.parallel
    return sorted({0, p.world_size // p.pp * (p.pp > 1), p.world_size - 1})


NAMES = [path.stem for path in list_preset_paths()]
LARGE = [name for name in NAMES if any(size in name for size in ("235b", "30b", "35b"))]


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in LARGE else n for n in NAMES])
def test_the_learner_of_a_preset_holds_what_the_plan_says(tmp_path, name):
    config = described(load_config(name), tmp_path / "model")
    learner, planned = config.learner, estimate_rank_memory(find_model_shape(config)[0], config)
    build = {"megatron": megatron_rank, "torch": torch_rank}[learner.backend]
    offloaded = learner.offload_moments
    learner.offload_moments = offloaded and learner.backend == "megatron"  # meta tensors cannot go to the host
    most: dict[str, int] = {}
    for rank in stages(config):
        with build(config, tmp_path / "model", rank) as made:
            adapters = made.adapters.list_parameters() if learner.lora.rank else []
            held = [local(p) for p in made.model.parameters()]
            found = {"parameters": sum(p.numel() for p in held), "weights": sum(p.nbytes for p in held)}
            found |= updated(made.optimizer)
            # Values, an adapted parameter's gradient, and that of one of its matrices in float32, from which theirs is made.
            found["adapters"] = sum(one.parameter.nbytes for one in adapters)
            found["adapters"] += max((one.candidate.parameter.nbytes for one in adapters), default=0)
            pairs = zip(adapters[::2], adapters[1::2], strict=True)
            matrices = [a.parameter.shape[-1] * b.parameter.shape[-2] for a, b in pairs]
            found["adapters"] += 4 * max(matrices, default=0)
        most = {part: max(most.get(part, 0), size) for part, size in found.items()}
    # FSDP divides each parameter's rows.
    # The last stage has one norm more than the first, of which the plan is if that needs more.
    exact = 1e-6 if learner.parallel.pp > 1 else 0
    assert most["parameters"] == pytest.approx(planned.parameters, rel=1e-3 if learner.backend == "torch" else exact)
    on_device = ("gradients", "masters", "adapters", *(["moments"] * (not offloaded)))
    optimizer = sum(most[part] for part in on_device)
    if learner.backend == "torch" and learner.parallel.dp > 1:
        # What FSDP puts together of layers, and a layer's gradient, is there while a pass is made.
        optimizer += planned.optimizer - (4 if offloaded else 12) * planned.parameters
        assert most["weights"] == pytest.approx(4 * planned.parameters, rel=1e-3)
    else:
        assert most["weights"] == pytest.approx(planned.weights, rel=exact)
    divided = learner.shard_optimizer or learner.backend == "torch"
    assert optimizer == pytest.approx(planned.optimizer, rel=0.002 if divided else 1e-6)


def test_divided_gradients_are_held_as_the_plan_says(tmp_path):
    """On the layout that they are for: nothing but experts is on one rank alone."""
    config = load_config(
        "moe_30b_r3",
        [
            "learner.parallel={dp=4,tp=1,pp=1,ep=4}",
            *("learner.shard_optimizer=true", "learner.shard_gradients=true", "learner.offload_moments=false"),
        ],
    )
    config = described(config, tmp_path / "model")
    numbers = PUBLISHED_CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(numbers))
    shape, _ = find_model_shape(config)
    planned = estimate_rank_memory(shape, config)
    config.learner.shard_gradients = False
    experts = shape.num_layers * shape.expert_parameters // 4
    rest = planned.parameters - experts
    assert estimate_rank_memory(shape, config).optimizer - planned.optimizer == pytest.approx(
        4 * rest * 3 / 4, rel=1e-6
    )
    config.learner.shard_gradients = True
    with megatron_rank(config, tmp_path / "model", 1) as made:
        found = updated(made.optimizer)
    assert found["gradients"] == pytest.approx(4 * (experts + rest / 4), rel=0.002)
    assert sum(found.values()) == pytest.approx(planned.optimizer, rel=0.002)


def test_ranks_that_divide_experts_hold_and_gather_what_the_plan_says(tmp_path):
    changes = ["learner.backend=torch", "learner.shard_optimizer=false", "learner.offload_moments=false"]
    config = described(
        load_config("moe_30b_r3", [*changes, "learner.parallel={dp=8,tp=1,pp=1,ep=4}"]), tmp_path / "model"
    )
    numbers = PUBLISHED_CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(numbers))
    shape, _ = find_model_shape(config)
    planned = estimate_rank_memory(shape, config)
    with torch_rank(config, tmp_path / "model", 5) as made:
        held = [local(p) for p in made.model.parameters()]
        assert sum(p.numel() for p in held) == pytest.approx(planned.parameters, rel=1e-3)
        found = updated(made.optimizer)
    assert sum(found.values()) == pytest.approx(12 * planned.parameters, rel=1e-3)
    config.learner.parallel.ep = 1
    everywhere = estimate_rank_memory(shape, config)
    assert everywhere.parameters == planned.parameters
    # Two layers in bfloat16 and the gradient of one in float32, three quarters of whose experts are elsewhere.
    assert everywhere.weights - planned.weights == 2 * 2 * shape.expert_parameters * 3 // 4
    assert everywhere.optimizer - planned.optimizer == 4 * shape.expert_parameters * 3 // 4
    traffic = [count_copy_bytes(shape, config, 10**6)]
    config.learner.parallel.ep = 4
    traffic.append(count_copy_bytes(shape, config, 10**6))
    assert traffic[1] < traffic[0] / 2


PARTS = {
    "embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "layernorm": "norms",
    "model.norm": "norms",
    "q_norm": "norms",
    "k_norm": "norms",
    "_a_proj": "norms",  # projections to low ranks: of the attention, what is not divided
    "self_attn": "attention",
    ".gate.weight": "routers",
    "shared_expert_gate": "routers",
    "shared_expert": "shared experts",
}
"""What the tensors of a checkpoint belong to: the first that is in their name."""


@pytest.mark.long
@pytest.mark.parametrize("variant", architectures.VARIANTS)
@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 3}, {"cp": 2, "pp": 3, "tp": 2}])
def test_each_part_of_any_model_is_on_a_rank_as_planned(tmp_path, variant, layout):
    kind = variant.partition("/")[0]
    numbers = architectures.SHARED | architectures.VARIANTS[variant] | {"model_type": kind, "rms_norm_eps": 1e-6}
    if kind == "olmoe":
        layout = {**layout, "tp": 1}
    numbers["num_hidden_layers"] = 6
    AutoConfig.for_model(**numbers).save_pretrained(tmp_path)  # with what transformers adds
    shape = parse_model_shape(json.loads((tmp_path / "config.json").read_text()))
    ep = 2 if shape.moe_layers and layout.get("cp", 1) * layout.get("dp", 1) * layout.get("tp", 1) > 1 else 1
    config = load_config(
        "quickstart", [f"learner.parallel.{key}={value}" for key, value in {**layout, "ep": ep}.items()]
    )
    per_stage = config.learner.parallel.world_size // config.learner.parallel.pp
    for rank in stages(config):
        expected, found = (
            shape.rank_parameters_by_part(config.learner, rank // per_stage),
            dict.fromkeys(PARTS.values(), 0),
        )
        found |= {"experts": 0, "dense": 0}
        with megatron_rank(config, tmp_path, rank) as made:
            for link in made.mappings:
                known = (part for word, part in PARTS.items() if word in link.tensor_names[0])
                part = "experts" if link.is_expert else next(known, "dense")
                found[part] += link.parameter.numel()
        assert found == expected, f"rank {rank}"
