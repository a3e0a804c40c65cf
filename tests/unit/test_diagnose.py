"""`r3async diagnose` without an engine: faults planted in both learners are located, sound ones of any model are left alone."""

import contextlib
import json
import shutil

import numpy as np
import pytest

from r3async.config import config_from_dict
from r3async.learner import build_learner
from r3async.tools.diagnose.diagnosis import examine_outputs
from r3async.tools.diagnose.reference import ReferenceModel
from r3async.tools.diagnose.tokens import check_tokens, count_untrained_ends
from r3async.tools.diagnose.witnesses import find_changed_tensors, observe_learner
from tests.helpers import architectures as ha
from tests.helpers import mismatches as hf


def settings(backend: str, dtype: str = "float32"):
    return config_from_dict({"learner": {"backend": backend, "dtype": dtype}})


def tokens(vocabulary: int = 96) -> np.ndarray:
    return np.random.default_rng(5).integers(0, vocabulary, 72).astype(np.int32)


def found(learner, model, config, reference=None):
    stale = find_changed_tensors(learner.export_weights(), model, config.learner.dtype)
    return examine_outputs(reference or ReferenceModel(model), observe_learner(learner, tokens(), stale, config))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hf.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model):
    return ReferenceModel(model)


@pytest.fixture(scope="module", params=["torch", "megatron"])
def learner(request, model):
    with contextlib.closing(build_learner(settings(request.param), model, frozen=True)) as learner:
        yield learner


@pytest.mark.parametrize("number", range(len(hf.IN_TORCH)))
def test_a_fault_in_a_learner_is_located(learner, reference, model, number):
    fault = (hf.IN_TORCH if learner.name == "torch" else hf.IN_MEGATRON)[number]
    with hf.planted(learner, fault.name):
        hf.check_first(found(learner, model, settings(learner.name), reference), fault)


def test_another_dtype_than_the_settings_say_is_reported(learners, reference, model):
    learner = learners(settings("torch", "bfloat16"), model, frozen=True)
    (only,) = examine_outputs(reference, observe_learner(learner, tokens(), [], settings("torch")))
    assert (only.stage, only.evidence) == ("dtype", "it computes in bfloat16; its settings say float32")


@pytest.mark.long
@pytest.mark.parametrize(("backend", "dtype"), [("torch", "bfloat16"), ("megatron", "float32")])
@pytest.mark.parametrize("variant", ha.VARIANTS)
def test_a_sound_learner_is_left_alone(learners, tmp_path, variant, backend, dtype):
    path, config = ha.make_model(tmp_path / "m", variant), settings(backend, dtype)
    assert found(learners(config, path, frozen=True), path, config) == []


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_another_chat_template_and_other_ends_are_reported(model, tmp_path):
    start, other = (shutil.copytree(model, tmp_path / name) for name in ("start", "model"))
    for path in (start, other):
        (path / "chat_template.jinja").write_text(TEMPLATE)
    assert list(check_tokens(start, other)) == []
    (other / "chat_template.jinja").write_text(TEMPLATE.replace("}}{%", "}};{%"))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 7]}))
    template, ends = check_tokens(start, other)
    assert (template.stage, ends.stage) == ("tokens", "tokens")
    assert "the first difference is at" in template.evidence
    assert "[7, 256, 257]" in ends.evidence


def test_an_end_that_was_sampled_and_is_not_trained_is_counted():
    from tests.helpers.models import make_sample

    end = 5
    table = make_sample(np.random.default_rng(0), 12, routes=False).table
    ids = np.where(np.arange(12) == 11, end, 7).astype(np.int32)
    table = table.with_columns(token_ids=ids)
    assert count_untrained_ends([table], (end,)) == (0, 1)
    left_out = table.with_columns(loss_mask=table["loss_mask"] & (ids != end))
    assert count_untrained_ends([left_out], (end,)) == (1, 1)
