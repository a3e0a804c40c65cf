"""What cannot start is refused by `--dry-run`, before anything starts: one line, exit code 2."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from r3async.data.engine_models import ENGINE_MODELS
from r3async.data.models import ARCHITECTURES, TORCH_ONLY_ARCHITECTURES, UNSUPPORTED_MODEL_TYPES
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers import architectures as ha
from tests.helpers.bad_inputs import judge
from tests.helpers.cli import Said, run_program, typed

ROOT = Path(__file__).parents[2]


def dry_run(*words: str, cwd: Path) -> Said:
    """In a process of its own: a model is built with process groups, of which one process has one."""
    scripted = ("generator.engine=scripted", "weights.probe=false")  # experts of these widths are not vLLM's on CPU
    words = (sys.executable, "-m", "r3async", "train", "quickstart", "--dry-run", *scripted, *words)
    return run_program(words, cwd=cwd, timeout=180)


def complete(directory: Path, variant: str) -> Path:
    """A model directory that a run could start with."""
    ha.make_model(directory, variant, max_position_embeddings=1024)
    build_byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return complete(tmp_path_factory.mktemp("models") / "deepseek", "deepseek_v3")


@pytest.mark.parametrize(
    "words", [["learner.backend=torch"], ["learner.parallel={dp=2, tp=2, ep=4}", "learner.dtype=bfloat16"]]
)
@pytest.mark.long
def test_a_model_that_is_here_is_built_and_fits(model, words, tmp_path):
    said = dry_run(f"model.path={model}", *words, cwd=tmp_path)
    assert said.returncode == 0, said
    assert "deepseek" in said.stdout


def spoil(model: Path, directory: Path, change) -> Path:
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


NAME = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop(NAME), f"lacks {NAME}"),
        (lambda t: t.update({NAME: t[NAME][:, :-8].clone()}), "config.json means (48, 64)"),
        (lambda t: t.update(other=t[NAME].clone()), "has tensors that are not of DeepSeek-V3: other"),
    ],
    ids=["missing", "misshapen", "unknown"],
)
@pytest.mark.long
def test_files_that_do_not_fit_are_refused(model, change, part, tmp_path):
    path = spoil(model, tmp_path / "m", change)
    judge(dry_run(f"model.path={path}", cwd=tmp_path), (part,))


WHOLE = {kind.removesuffix("_text"): {"model_type": kind, **own} for kind, own in ha.TORCH_ONLY.items()}
WHOLE["gpt_oss"] |= {"layer_types": ["full_attention"] * 3}


def described(directory: Path, **config) -> Path:
    """A directory that has everything but a model of that description."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**ha.SHARED, "head_dim": 16, "num_local_experts": 8, **config}))
    (directory / "model.safetensors").write_bytes(b"x")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return directory


@pytest.mark.parametrize("kind", UNSUPPORTED_MODEL_TYPES)
@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry", "start"])
def test_models_that_nothing_trains_are_refused_by_name(kind, words, tmp_path):
    path = described(tmp_path / "m", model_type=kind)
    said = typed("train", "quickstart", f"model.path={path}", "learner.backend=torch", *words, cwd=tmp_path)
    judge(said, (kind, UNSUPPORTED_MODEL_TYPES[kind], *ARCHITECTURES))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry", "start"])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts_per_tok"])
def test_a_mixture_that_is_described_by_other_words_is_refused_in_a_line(key, words, tmp_path):
    path = described(tmp_path / "m", **{"model_type": "hunyuan_v1_moe", key: None})
    judge(typed("train", "quickstart", f"model.path={path}", "learner.backend=torch", *words, cwd=tmp_path), (key,))


@pytest.mark.parametrize("kind", ["granitemoe", *TORCH_ONLY_ARCHITECTURES])
@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry", "start"])
def test_a_model_of_another_kind_is_refused_on_megatron(kind, words, tmp_path):
    path = described(tmp_path / "m", **({"model_type": kind} | WHOLE.get(kind, {})))
    said = typed("train", "quickstart", f"model.path={path}", *words, cwd=tmp_path)
    judge(said, (kind, 'set it to "torch"', *ARCHITECTURES))


@pytest.mark.parametrize(
    ("kind", "part"), [("no_such_kind", "`no_such_kind`"), ("t5", "'t5' is no causal language model")]
)
@pytest.mark.long
def test_a_model_that_transformers_has_no_class_for_is_refused_in_a_line(kind, part, tmp_path):
    path = described(tmp_path / "m", model_type=kind, max_position_embeddings=1024, head_dim=32)
    said = dry_run(f"model.path={path}", "learner.backend=torch", cwd=tmp_path)
    judge(said, (part, "`model.path`"))
    assert len(said.stderr.strip().splitlines()) == 1


def without(variant: str, name: str) -> dict[str, object]:
    return {key: value for key, value in ha.VARIANTS[variant].items() if key != name}


LONG = {"max_position_embeddings": 1024, "head_dim": 32}
SHORT = ("episode.max_total_tokens=256", "episode.max_prompt_tokens=128")
UNFIT = {
    "that engines compute with another number": (
        {"model_type": "olmoe", **ha.VARIANTS["olmoe"], **LONG, "rms_norm_eps": 1e-6},
        ["learner.backend=torch"],
        ("`rms_norm_eps` = 1e-06", "vLLM does not read", "olmoe with 1e-05", "r3async sft"),
    ),
    "that engines compute in another precision": (
        WHOLE["gpt_oss"] | LONG,
        ["learner.backend=torch"],
        ("gpt_oss in bfloat16 only", "generator.dtype=bfloat16"),
    ),
    "whose balance has no gradient": (
        {"model_type": "glm4_moe", **ha.VARIANTS["glm4_moe"], **LONG},
        ["algorithm.router_aux.coef=0.1"],
        ("algorithm.router_aux.coef", "glm4_moe", "set it to 0"),
    ),
    "without biases": (
        {"model_type": "qwen3_moe", **ha.VARIANTS["qwen3_moe"], **LONG},
        ["learner.expert_bias_rate=0.001"],
        ("learner.expert_bias_rate", "qwen3_moe", "set it to 0"),
    ),
    "with a size that transformers would fill in": (
        {"model_type": "qwen3_moe", **without("qwen3_moe", "moe_intermediate_size")},
        [],
        ("'moe_intermediate_size'", "config.json", "add the one that the weights have"),
    ),
} | {
    f"that the engine takes for another one without {name}": (
        {"model_type": "deepseek_v3", **without("deepseek_v3/moonlight", name)},
        SHORT,
        (f"`{name}` = null", "vLLM", "add it to that file"),
    )
    for name in sorted(ENGINE_MODELS["deepseek_v3"].needed_config)
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry", "start"])
def test_a_model_that_does_not_fit_the_settings_is_refused_in_a_line(kind, words, tmp_path):
    numbers, settings, parts = UNFIT[kind]
    path = described(tmp_path / "m", **numbers)
    said = typed("train", "quickstart", f"model.path={path}", *settings, *words, cwd=tmp_path)
    judge(said, parts)
    assert len(said.stderr.strip().splitlines()) == 1


def test_ranks_that_one_host_cannot_hold_are_refused(tmp_path):
    judge(
        typed("train", "moe_235b_r3", "--dry-run", "cluster.gpus_per_node=4", cwd=tmp_path),
        ("engines of 8 GPUs on one host", "host 1", "generator.engine_args.tensor_parallel_size"),
    )
    said = typed("train", "moe_235b_r3", "--dry-run", cwd=tmp_path)
    assert "places on 12 host(s) of 8 GPUs" in said.stdout
    assert "host 12: engine 3" in said.stdout


# -- names of the hub --------------------------------------------------------------------------------------------------


def cached(cache: Path, name: str, source: Path) -> Path:
    """Put a model into a cache of the hub, as `hf download` does; the snapshot's directory."""
    folder, revision = cache / f"models--{name.replace('/', '--')}", "a" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    shutil.copytree(source, folder / "snapshots" / revision)
    return folder / "snapshots" / revision


def test_a_name_of_the_hub_is_its_directory_in_the_cache(model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from r3async.config import load_config
    from r3async.tools.hub import resolve_hub_model

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    snapshot = cached(tmp_path / "hub", "org/tiny", model)
    config = load_config("quickstart", ["model.path=org/tiny"])
    for fetch in (False, True):
        assert resolve_hub_model(config, download=fetch).model.path == str(snapshot)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert resolve_hub_model(config, download=True).model.path == "org/tiny"  # a directory comes first


@pytest.mark.parametrize("there", [True, False], ids=["no-weights", "nothing"])
def test_a_name_that_cannot_be_fetched_says_so(model, there, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if there:
        (cached(tmp_path / "hub", "org/tiny", model) / "model.safetensors").unlink()
    said = typed("train", "quickstart", "model.path=org/tiny", cwd=tmp_path)
    judge(said, ("org/tiny", "cannot be fetched", "hf download org/tiny", "is not a model directory"))
    assert not (tmp_path / "runs").exists()
