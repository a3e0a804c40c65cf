"""A `config.json` that describes no model is refused in one line, at once, whatever is wrong with it."""

import json
import time

import pytest

from r3async.config import ConfigError, load_config
from r3async.data.model_shape import SIZE_BOUNDS, ModelShapeError, check_size_values, parse_model_shape
from r3async.tools.init_model import build_byte_tokenizer
from r3async.tools.memory import PUBLISHED_CONFIGS
from r3async.tools.preflight import check_dry_run
from tests.helpers import architectures as ha

STRANGE_VALUES = [-1, 10**12, 10**400, 1.5, "8", [3], {}, True]
WRONG = {
    "no layer": {"num_hidden_layers": 0},
    "ten million layers": {"num_hidden_layers": 10**7},
    "heads that do not divide": {"num_attention_heads": 5},
    "a vocabulary beyond any": {"vocab_size": 10**9},
    "a size that is null": {"hidden_size": None},
    "layers of kinds that are no list": {"layer_types": "full_attention"},
    "a dense layer that is not there": {"mlp_only_layers": [7]},
    "more chosen experts than there are": {"num_experts_per_tok": 99},
    "a flag that is a text": {"norm_topk_prob": "yes"},
    "a norm of a text": {"rms_norm_eps": "1e-6"},
    "an inner object that is a list": {"text_config": [1]},
    "a type that is a list": {"model_type": ["qwen3_moe"]},
    "rotary positions of a text": {"rope_parameters": "yarn"},
    "another vocabulary than the weights": {"vocab_size": 4096},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "model"
    ha.make_model(directory, "qwen3_moe", max_position_embeddings=1024)
    build_byte_tokenizer().save_pretrained(directory)
    return directory


def check(model, *settings):
    given = [f"model.path={model}", "generator.engine=scripted", "weights.probe=false", *settings]
    return check_dry_run(load_config("quickstart", given))


@pytest.fixture
def described(model):
    """`described(settings)` changes the model's `config.json` until the test ends."""
    file = model / "config.json"
    text = file.read_text()
    yield lambda settings: file.write_text(json.dumps(json.loads(text) | settings))
    file.write_text(text)


@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize("what", WRONG)
def test_a_config_that_describes_no_model_is_refused_at_once(what, backend, model, described):
    described(WRONG[what])
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        check(model, f"learner.backend={backend}")
    assert "\n" not in str(refused.value)
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("value", STRANGE_VALUES, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("key", SIZE_BOUNDS)
def test_a_size_of_another_type_or_beyond_every_model_is_named(key, value):
    if (key, value) in (("pad_token_id", -1), ("bos_token_id", -1)):
        return  # none
    with pytest.raises(ModelShapeError, match=f"`{key}` = "):
        check_size_values({key: value})


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_sizes_of_published_models_are_possible(name):
    assert parse_model_shape(PUBLISHED_CONFIGS[name]).num_parameters > 10**9


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_targets_of_adapters_that_name_nothing_are_refused_before_the_model_is_loaded(backend, model):
    settings = [f"learner.backend={backend}", "learner.lora.rank=4"]
    check(model, *settings, "learner.lora.targets=['q_proj', 'experts', 'mlp.gate']")
    with pytest.raises(ConfigError, match=r"`learner\.lora\.targets`: 'nothing' names no matrix .* self_attn\.q_proj"):
        check(model, *settings, "learner.lora.targets=['q_proj', 'nothing']")
    with pytest.raises(ConfigError, match=r"'mlp\.gate' names no matrix"):
        check(model, *settings, "learner.lora.targets=['mlp.gate']", "learner.freeze_router=true")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("chat_template.jinja", "{% for message in messages %}"),
        ("chat_template.jinja", "{{ messages[0].content.nothing() }}"),
    ],
)
def test_a_tokenizer_or_template_that_cannot_be_used_is_refused(file, text, model, tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for each in model.iterdir():
        if each.name != file:
            (copy / each.name).symlink_to(each)
    (copy / file).write_text(text)
    with pytest.raises(ConfigError, match=r"`model\.path` = ") as refused:
        check(copy)
    assert "\n" not in str(refused.value)
