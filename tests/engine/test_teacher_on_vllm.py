"""A teacher that vLLM's own OpenAI server serves scores as one that the ranks hold."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from r3async.config import load_config
from r3async.learner import LearnerError, build_learner
from r3async.learner.distillation import load_teacher
from r3async.learner.micro_batches import pack_samples
from r3async.learner.rank_group import SINGLE_RANK
from tests.helpers import models as hm

START_SECONDS = 240


@pytest.fixture(scope="module")
def address(tiny_model, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # The command `vllm` asks for a package of that name, which the one for CPUs is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--served-model-name", "teacher"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def read_config(tiny_model, address):
    words = [f"model.path={tiny_model}", "learner.backend=torch", f"algorithm.distillation.teacher={address}"]
    return load_config("quickstart", words)


def test_it_scores_as_the_learner_of_the_same_model(tiny_model, address):
    config = read_config(tiny_model, address)
    teacher = load_teacher(config, tiny_model, SINGLE_RANK)
    learner = build_learner(config, tiny_model)
    packed = pack_samples(hm.make_samples(3, [40, 7, 2], vocab=200), 64)
    found = teacher.logprobs(packed, replay=False, trained_only=True)
    wanted = learner.logprobs(packed, replay=False)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_tokens_of_another_model_are_refused(tiny_model, address, tmp_path):
    text = (tiny_model / "tokenizer.json").read_text()
    assert '"A"' in text
    (tmp_path / "tokenizer.json").write_text(
        text.replace('"A"', '"%swap"').replace('"B"', '"A"').replace('"%swap"', '"B"')
    )
    with pytest.raises(LearnerError, match=r"has other tokens than the model: id .* is 'A' there and 'B' here"):
        load_teacher(read_config(tiny_model, address), tmp_path, SINGLE_RANK)


def test_a_sample_that_is_too_long_for_its_server_is_told(tiny_model, address):
    teacher = load_teacher(read_config(tiny_model, address), tiny_model, SINGLE_RANK)
    packed = pack_samples(hm.make_samples(3, [4000], vocab=200), 4096)
    with pytest.raises(LearnerError, match=r"HTTP 400: .*length"):
        teacher.logprobs(packed, replay=False, trained_only=True)
