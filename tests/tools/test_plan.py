"""A dry run knows what a run is made of, and refuses what cannot run, before anything heavy is imported."""

import itertools
import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from r3async.config import ConfigError, LearnerConfig, LoraConfig, ParallelConfig, load_config
from r3async.data.model_shape import parse_model_shape
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.data.wire import encode_trajectory
from r3async.tools.adapted import count_slot_parameters
from r3async.tools.memory import (
    GIB,
    INIT_VOCAB_SIZE,
    PUBLISHED_CONFIGS,
    check_trainable,
    find_model_shape,
)
from r3async.tools.plan import count_wire_bytes, describe_plan, make_run_plan
from r3async.tools.preflight import make_checked_plan

MOE = parse_model_shape(PUBLISHED_CONFIGS["Qwen3-30B-A3B"], "Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("Qwen3-30B-A3B", 30_532_122_624, 3.35e9),
        ("Qwen3-235B-A22B", 235_093_634_560, 22.2e9),
        ("Qwen2.5-7B-Instruct", 7_615_616_512, 7.6e9),
    ],
)
def test_parameters_of_published_models_are_those_of_their_checkpoints(name, parameters, active):
    shape = parse_model_shape(PUBLISHED_CONFIGS[name], name)
    assert shape.num_parameters == parameters
    assert shape.active_parameters == pytest.approx(active, rel=0.01)


def test_parameters_are_those_that_transformers_makes(tiny_model):
    from transformers import AutoModelForCausalLM

    shape = parse_model_shape(json.loads((tiny_model / "config.json").read_text()), "tiny")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_an_initial_model_has_the_vocabulary_that_the_plan_says():
    from r3async.tools.init_model import build_byte_tokenizer

    assert -(-len(build_byte_tokenizer()) // 8) * 8 == INIT_VOCAB_SIZE


def test_ranks_together_hold_the_model_and_what_is_on_all_of_them():
    for dp, tp, pp, ep in [(1, 1, 1, 1), (8, 1, 1, 8), (1, 4, 2, 4), (2, 2, 2, 4), (4, 1, 4, 2)]:
        learner = LearnerConfig(parallel=ParallelConfig(dp=dp, tp=tp, pp=pp, ep=ep))
        held = sum(MOE.rank_parameters(learner, stage) for stage in range(pp))
        replicated = sum(MOE.norm_parameters + MOE.router_parameters for _ in range(MOE.num_layers)) + MOE.hidden_size
        experts = MOE.expert_parameters * MOE.num_layers
        rest = MOE.num_parameters - replicated - experts
        assert held == replicated + experts // ep + rest // tp


def test_layouts_that_do_not_divide_the_model_are_refused():
    for dp, tp, pp, ep in itertools.product((1, 2, 3), (1, 2, 3, 8), (1, 2, 5), (1, 2, 3, 6)):
        if dp * tp % ep:
            continue
        learner = LearnerConfig(parallel=ParallelConfig(dp=dp, tp=tp, pp=pp, ep=ep))
        fits = MOE.num_kv_heads % tp == MOE.num_layers % pp == MOE.num_experts % ep == 0
        assert refuses(learner) != fits, learner.parallel


def refuses(learner):
    try:
        check_trainable(MOE, learner)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(("layers", "top_k", "experts"), [(48, 8, 128), (4, 2, 300)])
def test_bytes_on_the_wire_are_those_of_an_encoded_trajectory(layers, top_k, experts):
    from r3async.data.model_shape import RoutingShape

    routes = np.tile(np.arange(top_k, dtype=np.uint8 if experts <= 256 else np.uint16), (1000, layers, 1))
    table = TokenTable.from_tokens(np.arange(1000)).with_columns(
        routed_experts=routes, routing_recorded=np.ones(1000, bool)
    )
    turn = Turn(0, 0, 0, 0, 0.0, "stop")
    trajectory = Trajectory("t", 0, 0, 0, "g", "stop", [turn], [Sample("s", table)])
    sent = sum(len(memoryview(frame).cast("B")) for frame in encode_trajectory(trajectory))
    assert sent / 1000 <= count_wire_bytes(RoutingShape(layers, top_k, experts)) + 4.096


@pytest.mark.parametrize(
    ("preset", "override", "parts"),
    [
        ("moe_30b_r3", "learner.parallel.tp=8", ["learner.parallel.tp", "4 key/value heads"]),
        ("moe_30b_r3", "learner.parallel.pp=5", ["learner.parallel.pp", "48 layers"]),
        ("moe_30b_r3", "learner.parallel.tp=1", ["`ep`", "dp * cp * tp"]),
        ("moe_30b_r3", "learner.offload_moments=false", ["learner", "GiB", "cluster.gpu_gib", "learner.recompute"]),
        ("moe_30b_r3", "generator.dtype=float32", ["tensor_parallel_size"]),
        ("moe_30b_r3", "transport.max_message_bytes=1000000", ["transport.max_message_bytes", "at least"]),
        ("moe_30b_r3", "model.path=models/Nothing-1B", ["model.path", "Nothing-1B", "Qwen3-30B-A3B"]),
        ("moe_30b_r3", "cluster.gpu_gib=-1", ["gpu_gib"]),
        ("dense_7b", "routing.replay=rollout", ["routing.replay", "off"]),
        ("dense_7b", "learner.backend=megatron", ["learner.parallel", "GiB"]),  # trained, but not divided by dp
        (
            "quickstart",
            "episode.max_total_tokens=40000 learner.max_tokens_per_micro_batch=40000",
            ["episode.max_total_tokens", "positions"],
        ),
        ("quickstart", "model.init.size=tiny", ["model.init.size", "32"]),
    ],
)
def test_nonsense_is_refused_with_the_settings_name(preset, override, parts):
    with pytest.raises(ConfigError) as caught:
        make_checked_plan(load_config(preset, override.split()))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("preset", "override", "parts"),
    [
        ("moe_30b_r3", "transport.host=127.0.0.1", ["transport.host", "leave it out"]),
        ("moe_30b_r3", "weights.backend=shared_memory", ['weights.backend="tcp"', "different hosts"]),
        ("moe_30b_r3", "weights.backend=nccl", ["weights.backend", "transport.trusted_network=true"]),
        ("moe_30b_r3", "weights.backend=nccl transport.host=0.0.0.0", ["weights.backend", "transport.host"]),
        (
            "math_one_gpu",
            "weights.backend=nccl env.name=countdown env.args={}",
            ["share GPU", "weights.backend"],
        ),
        ("dense_7b", "transport.host=127.0.0.1", []),
        ("dense_7b", "weights.backend=nccl", []),
        ("moe_30b_r3", "weights.backend=nccl transport.trusted_network=true", []),
    ],
)
def test_what_a_start_would_refuse_on_the_hosts_of_the_plan_is_refused_by_the_plan(preset, override, parts):
    """And by `r3async submit --dry-run`, on hosts that are there."""
    from r3async.actors.placement_plan import make_supposed_hosts
    from r3async.tools.fit import check_cluster_fit

    config = load_config(preset, override.split())
    made = make_run_plan(load_config("moe_30b_r3"))
    nodes = make_supposed_hosts(1, 1) if preset == "math_one_gpu" else make_supposed_hosts(2, 8)
    problems = check_cluster_fit(made, config, nodes).problems
    if not parts:
        assert make_run_plan(config).hosts
        assert problems == []
        return
    with pytest.raises(ConfigError) as caught:
        make_run_plan(config)
    for part in parts:
        assert part in str(caught.value)
    assert problems == [str(caught.value)]


def test_little_credit_is_said_and_not_refused():
    said = []
    for overrides in ([], ["transport.credit_bytes=268435456"]):
        config = load_config("moe_30b_r3", overrides)
        said.append("may wait at their generators" in describe_plan(make_run_plan(config), config))
    assert said == [False, True]


def test_engines_and_ranks_that_share_a_gpu_fit_it_together(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} and {i}", "answer": str(2 * i)}) + "\n" for i in range(9)))
    made = make_run_plan(load_config("math_one_gpu", [f"data.path={rows}"]))
    assert (made.gpus, made.shared) == (1, True)
    assert made.hosts == ["host 1: rank 0 of the learner; engine 0 on the ranks' GPUs"]
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization` to at most 0\.\d+, .*colocate") as caught:
        make_checked_plan(
            load_config("math_one_gpu", [f"data.path={rows}", "generator.engine_args.gpu_memory_utilization=0.9"])
        )
    most = str(caught.value).partition("to at most ")[2].partition(",")[0]
    make_run_plan(
        load_config("math_one_gpu", [f"data.path={rows}", f"generator.engine_args.gpu_memory_utilization={most}"])
    )
    apart = make_run_plan(load_config("math_one_gpu", [f"data.path={rows}", "cluster.gpus_per_node=2"]))
    assert (apart.gpus, apart.shared) == (2, False)


def test_engine_arguments_that_change_its_memory_are_planned():
    def planned(*args: str):
        config = load_config("moe_30b_r3", [f"generator.engine_args.{arg}" for arg in args])
        plan = make_checked_plan(config)
        free = [note.partition("there are ")[2].partition(":")[0] for note in plan.notes if "preempts" in note]
        return plan.engine, free, describe_plan(plan, config)

    plain, free, text = planned()
    assert plain.graphs == 3 * GIB
    assert free == ["12.6 GiB"]
    assert "CUDA graphs and context 3.0 GiB (assumed)" in text
    eager, free, text = planned("enforce_eager=true")
    assert eager.graphs == plain.graphs - 1.5 * GIB
    assert free == ["14.1 GiB"]
    assert ", context 1.5 GiB" in text
    halved, free, _ = planned("kv_cache_dtype=fp8")
    assert (2 * halved.kv_per_token, free) == (plain.kv_per_token, [])
    wide, _, _ = planned("max_num_batched_tokens=65536")
    assert 16 * plain.step < wide.step < 32 * plain.step  # logits stay
    _, free, _ = planned(f"kv_cache_memory_bytes={8 * GIB}")
    assert free == ["8.0 GiB"]
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes` = 30 GiB: an engine takes 60 GiB beside it"):
        planned(f"kv_cache_memory_bytes={30 * GIB}")
    with pytest.raises(ConfigError, match=r"its steps and graphs 44, .*lower `max_num_batched_tokens` there"):
        planned("max_num_batched_tokens=500000")


def test_a_plan_counts_processes_slots_and_bytes():
    config = load_config("moe_30b_r3")
    plan = make_run_plan(config)
    assert (plan.gpus, plan.slots, plan.staleness_bound, plan.episodes_per_step) == (16, 192, 2, 512)
    assert plan.wire_bytes_per_token == 48 * 8 + 1 + 21
    assert plan.wire_bytes_per_step == 512 * (4096 * 406 + 4096)
    assert 60 * GIB < plan.rank.total_bytes < 70 * GIB
    text = describe_plan(plan, config)
    for part in ("16 GPUs", "192 groups in flight", "at most 2 versions old", "recompute none", "places on 2 host"):
        assert part in text
    stepwise = load_config("quickstart", ["episode.rows=stepwise"])
    assert make_run_plan(stepwise).tokens_per_step == 3 * make_run_plan(load_config("quickstart")).tokens_per_step
    assert make_run_plan(load_config("on_policy", ["schedule.window=9"], None)).staleness_bound == 0
    assert make_run_plan(load_config("fully_async", ["schedule.window=17"])).staleness_bound == 5


def test_how_long_an_installation_may_take_follows_from_the_bytes_of_a_version_and_from_patience():
    config = load_config("moe_30b_r3")
    plan = make_run_plan(config)
    assert plan.version_bytes == pytest.approx(61e9, rel=0.01)
    assert (plan.first_install_seconds, plan.install_seconds) == pytest.approx((425, 242), rel=0.01)
    printed = "425 s for an engine's first installation, 242 s for each that follows"
    assert printed in describe_plan(plan, config)
    large = make_run_plan(load_config("moe_235b_r3"))
    assert large.first_install_seconds > 2 * 470, "to fetch and to load"
    patient = make_run_plan(load_config("moe_30b_r3", ["supervise.patience=2"]))
    assert (patient.first_install_seconds, patient.install_seconds) == pytest.approx((850, 484), rel=0.01)


def test_a_version_of_adapters_alone_is_planned_beside_the_weights_that_engines_get_once():
    alone = ["learner.lora.deliver=adapter", 'learner.lora.targets=["self_attn"]']
    config = load_config("moe_30b_lora", alone)
    plan = make_run_plan(config)
    assert plan.adapter_bytes == 2 * 48 * 32 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert plan.install_seconds < plan.first_install_seconds / 3
    text = describe_plan(plan, config)
    assert "56.9 GiB to each host once, then 51.0 MiB a version" in text
    assert plan.engine.adapters == 3 * plan.adapter_bytes
    assert "weights 56.9 GiB, slots for adapters 153.0 MiB, a step" in text
    merged = make_run_plan(load_config("moe_30b_lora")).engine
    assert plan.engine.bytes_beside_cache == merged.bytes_beside_cache + plan.engine.adapters
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.experts.*targets` = \[\"self_attn\"\]"):
        make_checked_plan(load_config("moe_30b_lora", alone[:1]))


@pytest.mark.parametrize(
    ("targets", "matrices"),
    [
        (["q_proj"], [(4096 + 512 + 512, 3 * 2048)]),  # what vLLM keeps in one matrix has slots together
        (["o_proj"], [(2048, 4096)]),
        (["self_attn"], [(4096 + 512 + 512, 3 * 2048), (2048, 4096)]),
    ],
)
def test_slots_are_divided_as_the_matrices_are(targets, matrices):
    shape, _ = find_model_shape(load_config("moe_30b_lora"))
    lora = LoraConfig(rank=20, targets=targets)
    for tp in (1, 4):
        divided = [(b, a // tp) if b == 2048 else (b // tp, a) for b, a in matrices]
        assert count_slot_parameters(shape, lora, tp) == 48 * 32 * sum(map(sum, divided))


def test_shared_experts_have_slots_with_the_dense_layer_that_is_adapted():
    path = "deepseek-ai/Moonlight-16B-A3B"
    shape, _ = find_model_shape(load_config("moe_30b_lora", [f"model.path={path}"]))
    lora = LoraConfig(rank=8, targets=["layers.0.mlp"])
    widths = [11264, *26 * [2 * 1408]]
    assert count_slot_parameters(shape, lora, 1) == 8 * sum(3 * (2048 + width) for width in widths)


def test_states_of_episodes_are_planned_in_pages_of_the_cache():
    def planned(*args: str):
        config = load_config("qwen3_5_35b_r3", [f"generator.engine_args.{arg}" for arg in args])
        plan = make_run_plan(config)
        return plan.engine, config.episode.max_total_tokens, describe_plan(plan, config)

    engine, tokens, text = planned()
    assert engine.kv_per_token == 10 * 1024  # of one of two ranks
    convolution = 3 * (2 * 16 * 128 + 32 * 128)
    state = 2 * (convolution + 32 * 128 * 128) // 2
    page = 16 * -(-state // (16 * 1024)) * 1024
    assert engine.states == 2 * 30 * page
    assert engine.kv_per_episode == engine.states + 10 * -(-tokens * 1024 // page) * page
    assert engine.kv_needed == 64 * engine.kv_per_episode
    assert "KV cache 10.0 KiB a token and 31.9 MiB of states an episode" in text
    alone, _, _ = planned("enable_prefix_caching=false")
    assert 2 * alone.states == engine.states
    every, _, _ = planned("mamba_cache_mode=all")
    assert every.states == 30 * -(-tokens * 1024 // page) * page
    wide, _, _ = planned("mamba_ssm_cache_dtype=float32")
    assert 1.9 < wide.states / engine.states < 2
    assert not make_run_plan(load_config("moe_30b_r3")).engine.states


def test_how_long_writing_may_take_follows_from_the_bytes_and_from_patience():
    config = load_config("moe_30b_r3")
    plan = make_run_plan(config)
    assert plan.checkpoint_bytes == pytest.approx(366e9, rel=0.01)
    assert (plan.write_seconds, plan.checkpoint_seconds) == pytest.approx((905, 3632), rel=0.01)
    for printed in ("at most 905 s to write (supervise.patience)", "3632 s to write"):
        assert printed in describe_plan(plan, config)
    patient = make_run_plan(load_config("moe_30b_r3", ["supervise.patience=2"]))
    assert (patient.write_seconds, patient.checkpoint_seconds) == pytest.approx((1810, 7264), rel=0.01)
    adapters = make_run_plan(load_config("moe_30b_lora"))
    assert (adapters.checkpoint_bytes, adapters.checkpoint_seconds) == (0, 1800)


def test_quantized_weights_are_planned_as_what_they_are_dequantized_to(tmp_path):
    config = PUBLISHED_CONFIGS["Qwen3-30B-A3B"]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def plan(**described):
        (tmp_path / "config.json").write_text(json.dumps(config | described))
        return make_run_plan(load_config("moe_30b_r3", [f"model.path={tmp_path}"]))

    plain, quantized = plan(), plan(quantization_config=fp8)
    assert msgspec.structs.replace(quantized, notes=plain.notes) == plain
    (note,) = set(quantized.notes) - set(plain.notes)
    assert note.startswith("the weights in fp8 (blocks of 128x128) are dequantized when they are read")
    assert "30.5 B parameters in bfloat16" in note
    with pytest.raises(ConfigError, match=r"`quant_method` = 'gptq'.* cannot be trained"):
        plan(quantization_config={"quant_method": "gptq"})


def test_a_dry_run_prints_its_plan_and_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; sys.argv = ['r3async', 'train', 'moe_30b_r3', '--dry-run', '--json']\n"
        "from r3async.tools.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=True)
    assert json.loads(done.stdout)["gpus"] == 16
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert not (tmp_path / "runs").exists()
