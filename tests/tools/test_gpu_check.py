"""`r3async doctor --gpu`: its parts on a CPU in small shapes, and on a GPU in real ones."""

import importlib
import inspect
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from r3async.learner.micro_batches import pack_samples
from r3async.tools.gpu_check import command
from r3async.tools.gpu_check.learner import count_training_flops, find_peak_flops
from r3async.tools.gpu_check.part import RESULT
from r3async.tools.gpu_check.place import OTHERS, make_samples

NAMES = [part.name for part in command.PARTS]


@pytest.mark.parametrize("part", command.PARTS, ids=NAMES)
def test_a_part_is_a_function_that_takes_its_arguments(part):
    module, name = part.target.split(":")
    function = getattr(importlib.import_module(f"r3async.tools.gpu_check.{module}"), name)
    inspect.signature(function).bind(None, **part.arguments)


def test_each_part_has_its_own_name_and_every_prediction_a_part():
    assert len(set(NAMES)) == len(NAMES)
    assert set(command.predictions()) <= set(NAMES)
    assert all(low <= high for figures in command.predictions().values() for low, high in figures.values())


OWNER = """
import sys
from pathlib import Path
from r3async.tools.gpu_check.command import run_parts
run_parts(Path(sys.argv[1]), small=True, only=["quickstart float32"], cuda=False, say=print)
"""


def test_a_run_that_a_part_started_ends_with_the_command_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)]) as owner:
        started, deadline = [], time.monotonic() + 240
        while not any("train" in process.cmdline() for process in started):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            started = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
    _, left = psutil.wait_procs(started, timeout=240)
    assert not left


def test_what_lies_outside_a_prediction_is_said_of_real_shapes_only():
    row = {"part": "experts grouped", "seconds": 1.0, "steady_ms": 400.0, "tflops": 300.0, "ok": True}
    (said,) = [line for line in command.render([row], small=False) if "predicted" in line]
    assert "steady_ms 400, predicted 5 to 25" in said
    assert "tflops" not in said
    assert not any("predicted" in line for line in command.render([row], small=True))


def test_mfu_counts_attention_and_nothing_twice(tmp_path):
    """By hand, for one layer of width 8: two heads of four that share keys and values, and one of three experts."""
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    mixture = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 5}
    config = {"model_type": "qwen3_moe"} | OTHERS | {"vocab_size": 16} | shape | mixture
    (tmp_path / "config.json").write_text(json.dumps(config))
    projections = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # queries, keys, values, output
    for_each_token = projections + 3 * 8 * 5 + 8 * 3 + 8 * 16  # one expert, the router, the logits
    seen_keys = (6 * 6 + 3 * 3) / 2  # half of all pairs, by the causal mask
    forward = 2 * ((6 + 3) * for_each_token + seen_keys * 2 * (4 + 4))  # scores and values, of two heads
    batches = pack_samples(make_samples(1, [6, 3], tmp_path), 16)
    assert count_training_flops(tmp_path, batches) == pytest.approx(3 * forward)


def test_the_peak_of_a_card_is_found_by_its_whole_name():
    assert find_peak_flops("NVIDIA H200") == find_peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert find_peak_flops("NVIDIA H20") == 148e12
    assert find_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert find_peak_flops("NVIDIA GeForce RTX 4090") is None


def test_without_a_gpu_it_says_what_to_install(tmp_path):
    screen = io.StringIO()
    assert command.check_gpu(tmp_path, small=False, only=[], minutes=1, console=Console(file=screen)) == 2
    assert "sees no GPU" in screen.getvalue()
    assert not list(tmp_path.iterdir())


PROGRAM = """
import json, sys, time
name = sys.argv[1]
if name == "hangs":
    time.sleep(600)
if name == "fails":
    raise SystemExit("no such kernel")
print("{result}" + json.dumps({{"ok": name != "wrong", "figure": 3.0}}))
"""


@pytest.fixture
def parts(monkeypatch):
    """Parts that do what their name says; the calls made."""
    calls = []

    def line(out, small, target, arguments):
        calls.append(target.split(":")[1])
        return [sys.executable, "-c", PROGRAM.format(result=RESULT), calls[-1]]

    monkeypatch.setattr(command, "command", line)
    monkeypatch.setattr(
        command, "PARTS", [command.Part(f"learner:{n}", {}) for n in ("good", "wrong", "fails", "good2")]
    )
    return calls


def test_one_that_fails_costs_no_other_and_only_what_was_not_good_runs_again(parts, tmp_path):
    def run():
        found = command.run_parts(tmp_path, small=True, cuda=False, say=lambda line: None)
        return {row["part"]: ("failure" in row, row.get("ok")) for row in found}

    expected = {"good": (False, True), "wrong": (False, False), "fails": (True, None), "good2": (False, True)}
    assert run() == expected
    assert parts == ["good", "wrong", "fails", "good2"]
    assert set(json.loads((tmp_path / command.RESULTS).read_text())) == set(expected)
    parts.clear()
    assert run() == expected
    assert parts == ["wrong", "fails"]


def test_a_part_that_hangs_is_ended_at_the_limit_and_the_next_is_left(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PARTS", [command.Part(f"learner:{n}", {}) for n in ("hangs", "good")])
    said, began = [], time.monotonic()
    found = command.run_parts(tmp_path, small=True, seconds=1.0, cuda=False, say=said.append)
    assert time.monotonic() - began < 60
    assert [row["part"] for row in found] == ["hangs"]
    assert "no answer within" in found[0]["failure"]
    assert "good: left for the next call" in said


def test_what_needs_cuda_is_left_out_on_a_cpu(tmp_path):
    said = []
    assert not command.run_parts(tmp_path, small=True, only=["generations graphs"], cuda=False, say=said.append)
    assert said == ["generations graphs: left out, for it needs CUDA"]


def _good(out: Path, *names: str, small: bool) -> None:
    found = command.run_parts(out, small=small, only=names, cuda=not small, say=print)
    assert found
    assert all(row.get("ok") for row in found), "\n".join(command.render(found, small=small))


@pytest.mark.nightly
def test_experts_and_attention_in_small_shapes(tmp_path):
    _good(tmp_path, "machine", "experts grouped", "attention", small=True)


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_learner_and_engine_in_small_shapes(tmp_path):
    names = ("parity megatron bfloat16", "generations eager", "learner_agrees eager megatron", "updates eager keep")
    _good(tmp_path, *names, small=True)


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_killed_run_resumes_in_small_shapes(tmp_path):
    _good(tmp_path, "killed bfloat16", small=True)


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.gpu
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", NAMES)
def test_on_this_gpu(results, name):
    _good(results, name, small=False)
