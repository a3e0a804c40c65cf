"""Parts of the worker extension that need no engine."""

import msgspec
import pytest
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from r3async.rollout.vllm import worker as vllm_worker
from r3async.rollout.vllm.worker import WorkerExtension
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.loaded: set[str] = set()

    def load_weights(self, weights) -> None:
        self.loaded |= {name for name, _ in weights}


class WrappingRunner:
    """A first model runner as it is with CUDA graphs: its `model` is vLLM's wrapper, which runs a graph."""

    get_model = GPUModelRunner.get_model

    def __init__(self, model: Model):
        self.model = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
        self.model.runnable = model

    def reload_weights(self, weights_iterator) -> None:
        self.get_model().load_weights(weights_iterator)  # as vLLM does


def test_tensors_are_counted_under_a_wrapper_of_the_model(monkeypatch):
    """What is set on a wrapper hides nothing of the model inside, so the loader would be seen to load nothing."""
    monkeypatch.setattr(vllm_worker, "find_unfilled_modules", lambda model: [])
    model, worker = Model(), WorkerExtension()
    worker.model_runner = WrappingRunner(model)
    published = WeightManifest(3, "", {name: TensorEntry("float32", (1,), 0) for name in ("a", "b")}, 8)
    worker.r3_reload_tensors(published, [(name, torch.zeros(1)) for name in ("a", "b")])
    assert model.loaded == {"a", "b"}
    with pytest.raises(WeightError, match="tensor 'b' was not loaded"):
        worker.r3_reload_tensors(published, [("a", torch.zeros(1))])
    assert "load_weights" not in vars(model)
    assert not worker.model_runner.model.__dict__.keys() - {"runnable"}


def test_a_buffer_that_keeps_what_it_held_is_found(monkeypatch):
    """Beside parameters, models compute with views of them, which a reload may leave behind."""
    monkeypatch.setattr(vllm_worker, "find_unfilled_modules", lambda model: [])
    model, worker = Model(), WorkerExtension()
    model.register_buffer("view", torch.ones(2), persistent=False)
    worker.model_runner = WrappingRunner(model)
    published = WeightManifest(3, "", {"a": TensorEntry("float32", (1,), 0)}, 4)
    with pytest.raises(WeightError, match="loader left out 'view'"):
        worker.r3_reload_tensors(published, [("a", torch.zeros(1))])
    monkeypatch.setattr(Model, "load_weights", lambda self, weights: [self.view.copy_(tensor) for _, tensor in weights])
    worker.r3_reload_tensors(published, [("a", torch.zeros(1))])


def test_vllms_configuration_is_set_while_weights_are_loaded():
    """Some of its layers ask for it when they process weights, and raise where none is set."""
    configuration, seen = VllmConfig(), []

    class Worker(WorkerExtension):
        vllm_config = configuration

        def r3_load_file(self, published) -> None:
            seen.append(get_current_vllm_config())

    published = WeightManifest(3, "", {"a": TensorEntry("float32", (1,), 0)}, 4)
    assert Worker().r3_install_version(msgspec.msgpack.encode(published)) == (3, published.digest)
    assert seen == [configuration]
