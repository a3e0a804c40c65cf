"""A host that does not see the files of the run: what it is given of the model, and how it is noticed."""

import json
import shutil
from types import SimpleNamespace

import msgspec
import pytest

from r3async.actors.process import RunFailed
from r3async.actors.remote_generators import (
    check_shares_run_directory,
    fetch_model_files,
    publish_model_files,
    shares_run_directory,
    write_engine_model,
)
from r3async.checkpoint.run_starts import begin_lineage
from r3async.config.generator import GeneratorConfig
from r3async.learner.torch.backend import TorchLearner
from r3async.record.events import EVENTS_FILE, open_event_log
from r3async.record.reading import read_json_objects
from r3async.rollout.engine import TENSOR_NAMES_FILE
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.vllm.engine import VllmEngine, read_tensor_names
from r3async.rollout.vllm.version_installer import verify_manifest
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.world.real import REAL_WORLD, RealWorld
from tests.helpers import architectures as ha
from tests.helpers import published
from tests.helpers.torch import settings


class Shared(RealWorld):
    """Whose actors share values as they are."""

    def __init__(self):
        self.actors = SimpleNamespace(put=lambda value: value, get=lambda value: value)  # type: ignore[assignment]


def test_a_host_without_the_model_gets_all_but_its_weights(untrained, tmp_path):
    here = tmp_path / "model"
    shutil.copytree(untrained, here)
    offered = msgspec.msgpack.decode(msgspec.msgpack.encode(tuple(publish_model_files(Shared(), here))))
    assert not any(name.endswith(".safetensors") for name in offered[1])
    given = publish_model_files(Shared(), here)
    assert fetch_model_files(Shared(), given, tmp_path / "run") == str(here), "it is here"
    names, text = read_tensor_names(here), ChatRenderer.from_model(here).encode("abc")
    shutil.rmtree(here)
    path = fetch_model_files(Shared(), given, tmp_path / "run")
    assert path.startswith(str(tmp_path / "run"))
    assert read_tensor_names(tmp_path / "run" / "model-of-the-run") == names != frozenset()
    assert ChatRenderer.from_model(path).encode("abc") == text


def test_engines_begin_without_quantized_weights_on_every_host(tmp_path):
    here = ha.make_model(tmp_path / "model", "qwen3_moe")
    names = read_tensor_names(here)
    published.quantize_to_fp8(here)
    assert len(published.read(here)) > len(names)
    assert read_tensor_names(here) == names != frozenset()
    path = write_engine_model(Shared(), here, tmp_path / "run")
    engine = VllmEngine(str(path), GeneratorConfig(dtype="bfloat16", concurrency=1), max_model_len=64)
    assert engine.engine_args["load_format"] == "dummy"
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    given = publish_model_files(Shared(), path)
    shutil.rmtree(path)
    elsewhere = fetch_model_files(Shared(), given, tmp_path / "other")
    assert read_tensor_names(tmp_path / "other/model-of-the-run") == names
    assert elsewhere == str(tmp_path / "other/model-of-the-run")


def test_an_engine_takes_the_text_model_alone_and_versions_without_what_is_carried(tmp_path):
    path = published.make_vision_model(tmp_path / "model")
    engine = VllmEngine(str(path), GeneratorConfig(dtype="bfloat16", concurrency=1), max_model_len=64)
    assert engine.engine_args["language_model_only"] is True
    file = tmp_path / "version.safetensors"
    trained = {n: t for n, t in published.read(path).items() if not n.startswith(("model.visual.", "mtp."))}
    published.save_file(trained, file)
    manifest = WeightManifest(0, str(file), dict.fromkeys(trained), 0, source="elsewhere")
    names = read_tensor_names(path)
    with pytest.raises(WeightError, match=r"model\.visual\.blocks.* is missing \(23 in all\)"):
        verify_manifest(manifest, names)
    verify_manifest(msgspec.structs.replace(manifest, carried=tuple(names - trained.keys())), names)


def test_a_tied_output_layer_that_the_files_have_need_not_be_in_a_version(tmp_path):
    path = ha.make_model(tmp_path / "model", "qwen2")
    names = read_tensor_names(path)
    published.rewrite(path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    learner = TorchLearner.from_pretrained(settings(), path)
    assert read_tensor_names(path) == names == learner.export_weights().keys()
    assert not learner.carried


@pytest.mark.parametrize("without", [False, True])
def test_an_engine_without_weights_begins_with_made_up_ones(tiny_model, tmp_path, without):
    here = tmp_path / "model"
    shutil.copytree(tiny_model, here)
    if without:
        (here / TENSOR_NAMES_FILE).write_text("[]")
    engine = VllmEngine(str(here), GeneratorConfig(dtype="float32", concurrency=1), max_model_len=64)
    assert engine.engine_args.get("load_format") == ("dummy" if without else None)


def test_a_directory_that_is_no_model_is_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr("r3async.actors.remote_generators.MAX_MODEL_FILES_BYTES", 100)
    (tmp_path / "log").write_bytes(b"x" * 101)
    with pytest.raises(RunFailed, match="more than 100 bytes beside its weights"):
        publish_model_files(Shared(), tmp_path)


def test_who_sees_the_runs_directory_sees_its_newest_start(tmp_path):
    assert not shares_run_directory(tmp_path, 1, REAL_WORLD.files)
    first = begin_lineage(tmp_path, None, "model")
    assert shares_run_directory(tmp_path, first.number, REAL_WORLD.files)
    second = begin_lineage(tmp_path, None, "model")
    seen = [shares_run_directory(tmp_path, start.number, REAL_WORLD.files) for start in (first, second)]
    assert seen == [False, True]
    check_shares_run_directory({"host": "b", "sees_run": True}, tmp_path)
    with pytest.raises(RunFailed, match=r"the learner is on host b, which does not see .*--runs"):
        check_shares_run_directory({"host": "b", "sees_run": False}, tmp_path)


def test_events_are_in_the_file_and_reported(tmp_path):
    reported = []
    open_event_log(tmp_path, "generator-0", unsent=reported).info("generator_started", pid=3)
    assert [msgspec.json.decode(line) for line in reported] == read_json_objects(tmp_path / EVENTS_FILE)
