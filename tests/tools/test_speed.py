"""The estimated speed of learner and engines: it gives back what it was made from, and the layouts that it chooses are the
fastest that fit."""

import msgspec
import pytest

from r3async.config import load_config
from r3async.tools.generation_speed import GenerationSpeed
from r3async.tools.layouts import AS_FAST, MEMORY_HEADROOM, choose_layout, find_fitting_layouts
from r3async.tools.memory import GIB, estimate_rank_memory, find_model_shape
from r3async.tools.plan import describe_plan, make_run_plan
from r3async.tools.presets import list_preset_paths
from r3async.tools.speed import estimate_speed

TOKENS = 512 * 4096
ALONE = ["learner.parallel={dp=1,tp=1,pp=1,ep=1}", "learner.shard_optimizer=false", "learner.offload_moments=false"]


def speed(*words, layers=None, tokens=TOKENS):
    config = load_config("moe_30b_r3", list(words))
    shape, _ = find_model_shape(config)
    if layers:
        shape = msgspec.structs.replace(shape, num_layers=layers, moe_layers=tuple(range(layers)))
    return estimate_speed(shape, config, tokens)


def test_four_layers_on_one_gpu_are_as_fast_as_they_were():
    """docs/benchmarks.md#one-gpu."""
    made = speed(*ALONE, "learner.recompute=full", layers=4, tokens=4 * 8192)
    assert 32_000 < made.tokens_per_second < 36_900
    assert made.describe_parts() == "computing 100%"


def test_each_part_of_a_layout_takes_its_time():
    def seconds(*words):
        return speed(*words).seconds

    layout = "learner.parallel={{dp={},tp={},pp={},ep={}}}"
    one = seconds(*ALONE)
    eight = seconds(layout.format(8, 1, 1, 8))
    assert eight["computing"] == pytest.approx(one["computing"] / 8)
    assert eight["tokens to experts"] > 0 == one["tokens to experts"]
    assert eight["activations between tensor-parallel ranks"] == 0 == eight["waiting of pipeline stages"]
    across = seconds(layout.format(8, 1, 1, 8), "cluster.gpus_per_node=4")
    assert across["tokens to experts"] > 5 * eight["tokens to experts"]
    tensor = seconds(layout.format(2, 4, 1, 8))
    assert tensor["activations between tensor-parallel ranks"] > 0
    assert tensor["tokens to experts"] == pytest.approx(eight["tokens to experts"])
    stages = seconds(layout.format(2, 1, 4, 2))
    assert stages["waiting of pipeline stages"] > 0
    assert seconds("learner.recompute=full")["computing"] > 1.3 * seconds()["computing"]
    divided = seconds(layout.format(8, 1, 1, 8), "learner.shard_gradients=true")
    copies = "gradients and weights between copies"
    micro_batches = TOKENS // 8 // 8192
    assert divided[copies] == pytest.approx(eight[copies] * (4 * micro_batches + 2) / (4 + 2))
    assert "moments from host memory" not in one


def test_divided_gradients_let_experts_over_all_ranks_fit_without_tensor_parallel_ranks():
    words = ["learner.parallel={dp=8,tp=1,pp=1,ep=8}", "learner.recompute=full", "learner.offload_moments=false"]
    needed = []
    for divided in ("false", "true"):
        config = load_config("moe_30b_r3", [*words, f"learner.shard_gradients={divided}"])
        needed.append(estimate_rank_memory(find_model_shape(config)[0], config).total_bytes / GIB)
    room = MEMORY_HEADROOM * config.cluster.gpu_gib
    assert needed[0] > room > needed[1]


def test_the_chosen_layout_fits_and_is_as_fast_as_any_that_fits():
    config = load_config("moe_30b_r3")
    shape, _ = find_model_shape(config)
    found = list(find_fitting_layouts(shape, config, 8, TOKENS))
    chosen = choose_layout(shape, config, 8, TOKENS)
    assert chosen in found
    assert chosen.tokens_per_second >= AS_FAST * max(layout.tokens_per_second for layout in found)
    assert all(layout.memory.total_bytes <= MEMORY_HEADROOM * 79 * GIB for layout in found)
    assert len({layout.describe_settings() for layout in found}) == len(found)


def test_a_slower_layout_is_named_with_the_faster_one():
    slow = load_config("moe_30b_r3", ["learner.recompute=full"])
    notes = make_run_plan(slow).notes
    assert any("by the same estimate: 'learner.parallel={ dp = 4, tp = 2" in note for note in notes)


@pytest.mark.parametrize("name", [p.stem for p in list_preset_paths() if p.stem in ("dense_7b",) or "moe" in p.stem])
def test_presets_for_gpus_say_how_fast_and_why_and_have_the_layout_that_is_chosen(name):
    config = load_config(name)
    plan = make_run_plan(config)
    text = describe_plan(plan, config)
    assert f"some {plan.speed.tokens_per_second:,.0f} tokens/s a GPU" in text
    assert "computing" in text
    assert ("NeMo AutoModel publishes 12,040" in text) == ("30b" in name)
    assert not any("same estimate" in note for note in plan.notes)


def generation(*words):
    return make_run_plan(load_config("moe_30b_r3", list(words))).generation


def test_an_engine_samples_more_with_more_episodes_and_with_shorter_contexts():
    few, many = generation("generator.concurrency=8"), generation("generator.concurrency=64")
    assert few.tokens_per_second < many.tokens_per_second < 8 * few.tokens_per_second
    short = generation("episode.max_total_tokens=2048", "episode.max_new_tokens=1024", "episode.max_prompt_tokens=512")
    assert short.tokens_per_second > generation().tokens_per_second
    # One episode reads all weights for each of its tokens: 61 GB at 2 TB/s.
    assert generation("generator.concurrency=1").tokens_per_second == pytest.approx(29, rel=0.05)


def test_an_engine_has_no_more_episodes_than_the_slots_allow():
    assert generation("generator.concurrency=1000").episodes == 192 * 8 / 8


def test_so_many_engines_keep_up_with_the_learner():
    speed = GenerationSpeed(64, 1500.0)
    assert [speed.count_engines(each) for each in (1500.0, 1501.0, 32_000.0)] == [1, 2, 22]
    config = load_config("moe_30b_r3")
    plan = make_run_plan(config)
    needed = plan.generation.count_engines(8 * plan.speed.tokens_per_second)
    assert f"{needed} such engines sample as fast as the learner trains" in describe_plan(plan, config)
    assert make_run_plan(load_config("quickstart")).generation is None
