"""A teacher behind vLLM's completions, here a server that answers as a model of transformers does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from r3async.config import ConfigError, load_config
from r3async.learner import LearnerError
from r3async.learner.distillation import load_teacher
from r3async.learner.micro_batches import pack_samples
from r3async.learner.rank_group import SINGLE_RANK
from r3async.learner.served_teacher import ServedTeacher
from tests.helpers import models as hm
from tests.unit.test_distillation import settings


class Server:
    """A server of `model`. `answers` are given first, each a status and a body."""

    def __init__(self, model_path, names=("teacher",)):
        self.model = hm.load_hf(model_path)
        self.answers = []
        self.prompts = []
        self.texts = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def answer(self, status, body):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                assert self.path == "/v1/models"
                self.answer(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions"
                assert request["model"] == "teacher"
                outer.prompts.append(request["prompt"])
                self.answer(*(outer.answers.pop(0) if outer.answers else (200, outer.complete(request["prompt"]))))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def complete(self, ids):
        with torch.no_grad():
            logs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [
            {str(token): {"logprob": float(log[token]), "rank": 1, "decoded_token": self.texts.get(token)}}
            for log, token in zip(logs, ids[1:], strict=False)
        ]
        return {"object": "text_completion", "choices": [{"text": "", "prompt_logprobs": [None, *entries]}]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    made = hm.make_hf_model(base / "s"), hm.make_hf_model(base / "t", seed=1)
    for path in made:
        vocabulary = {f"word{index}": index for index in range(hm.VOCAB)}
        Tokenizer(models.WordLevel(vocabulary, "word0")).save(str(path / "tokenizer.json"))
    return made


@pytest.fixture
def server(paths):
    server = Server(paths[1])
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def teacher(server):
    return ServedTeacher(server.url, SINGLE_RANK, patience_seconds=0.01)


def test_it_scores_as_one_that_the_ranks_hold(paths, server):
    held = load_teacher(settings("torch", paths[1]), paths[0], SINGLE_RANK)
    served = load_teacher(settings("torch", server.url), paths[0], SINGLE_RANK)
    samples = [msgspec.structs.replace(sample, temperature=1.0) for sample in hm.make_families(1)]
    for shared in (False, True):
        packed = pack_samples(samples, 4096, share_prefixes=shared)
        found = served.logprobs(packed, replay=False, trained_only=True)
        wanted = held.logprobs(packed, replay=False, trained_only=False)
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_busy_server_is_asked_again(server):
    teacher = ServedTeacher(server.url, SINGLE_RANK, patience_seconds=30)
    server.answers = [(503, b"loading"), (429, b"later")]
    (found,) = teacher.logprobs(pack_samples(hm.make_samples(1, [5]), 64), replay=False, trained_only=False)
    assert len(server.prompts) == 3
    assert found[0] == 0
    assert (found[1:] < 0).all()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((400, {"message": "longer than max_model_len"}), "HTTP 400: .*longer than max_model_len"),
        ((401, b""), "HTTP 401"),
        ((200, b"<html>"), "JSON"),
        ((200, {"choices": []}), "choices"),
        ((200, {"choices": [{"text": "a"}]}), "does not give the log-prob of each token"),
        ((200, {"choices": [{"prompt_logprobs": [None, {"9999": {"logprob": -1.0}}]}]}), "does not give"),
        ((500, b"broken"), "HTTP 500: broken"),
    ],
)
def test_an_answer_that_is_none_is_named(server, teacher, answer, says):
    server.answers = [answer] * 2
    with pytest.raises(LearnerError, match=rf"algorithm\.distillation\.teacher = .*{says}"):
        teacher.logprobs(pack_samples(hm.make_samples(1, [5]), 64), replay=False, trained_only=False)


def test_no_server_is_named(teacher, server):
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(LearnerError, match="refused"):
        teacher.logprobs(pack_samples(hm.make_samples(1, [5]), 64), replay=False, trained_only=False)


def test_a_server_of_several_models_is_refused(paths):
    server = Server(paths[1], names=("a", "b"))
    with pytest.raises(LearnerError, match="serves a, b"):
        load_teacher(settings("torch", server.url), paths[0], SINGLE_RANK)
    server.http.shutdown()


def test_other_tokens_are_refused(paths, server):
    load_teacher(settings("torch", server.url), paths[0], SINGLE_RANK)
    server.texts = {7: "something else"}
    with pytest.raises(LearnerError, match="id 7 is 'something else' there and 'word7' here"):
        load_teacher(settings("torch", server.url), paths[0], SINGLE_RANK)


@pytest.mark.parametrize("setting", ["episode.temperature=0.7", "episode.top_p=0.9", "episode.top_k=20"])
def test_samples_of_another_distribution_are_refused(setting):
    words = ["algorithm.distillation.teacher=http://host:8000/v1", setting]
    with pytest.raises(ConfigError, match="scores tokens at temperature 1"):
        load_config("quickstart", words)
