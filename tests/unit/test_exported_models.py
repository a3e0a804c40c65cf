"""What stands beside exported weights: a configuration and files that name nothing that was not written."""

import json

import pytest

from r3async.learner import LearnerError
from r3async.learner.model_directory import save_version_as_model
from r3async.learner.torch.described import read_model_config


def export(source, config, directory):
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_version_as_model(directory, source, lambda target: target.write_bytes(b"new"), "bfloat16")
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "use_mtp"])
@pytest.mark.parametrize("nested", [False, True])
def test_layers_for_multi_token_prediction_are_not_declared(tmp_path, name, nested):
    layers = {name: 1, "mtp_layer_types": ["full_attention"], "num_hidden_layers": 2}
    written = export(tmp_path / "m", {"text_config": layers} if nested else layers, tmp_path / "out")
    assert written.get("text_config", written) == (
        {name: 0, "num_hidden_layers": 2} | ({} if nested else {"dtype": "bfloat16"})
    )


def test_other_keys_of_the_configuration_stay(tmp_path):
    config = {"model_type": "glm4_moe", "rope_parameters": {"rope_type": "default"}, "layer_types": ["full_attention"]}
    config |= {"auto_map": {"AutoConfig": "own.py:Config"}, "tie_word_embeddings": True, "attempts": 3}
    assert export(tmp_path / "m", config | {"torch_dtype": "float32"}, tmp_path / "out") == (
        config | {"dtype": "bfloat16"}
    )


def test_files_of_earlier_weights_are_not_copied(tmp_path):
    source = tmp_path / "m"
    source.mkdir()
    kept = ["generation_config.json", "tokenizer.json", "chat_template.jinja", "own.py", "tokenizer.model", "LICENSE"]
    left_out = ["model-00001-of-00002.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "tf_model.h5"]
    left_out += ["flax_model.msgpack", "consolidated.00.pth", "model.onnx", "adapter_config.json", "adapter_model.bin"]
    for name in (*kept, *left_out):
        (source / name).write_text("{}")
    (source / "config.json").write_text("{}")
    save_version_as_model(tmp_path / "out", source, lambda target: target.write_bytes(b"new"), "float32")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", *kept}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantized_weights_are_refused_wherever_they_are_described(tmp_path, key, nested):
    described = {key: {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": described} if nested else described))
    with pytest.raises(LearnerError, match="quantized weights"):
        read_model_config(tmp_path)
