"""A teacher of on-policy distillation that an engine elsewhere serves, by the completions of vLLM's
OpenAI server.

A sample's tokens are the prompt of a request, and `prompt_logprobs` of the answer are the teacher's.
They are those of temperature 1 over the whole vocabulary, so samples must be drawn likewise.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np

from r3async.learner.results import LearnerError
from r3async.untrusted import MalformedError, decode_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from r3async.learner.micro_batches import MicroBatch
    from r3async.learner.rank_group import RankGroup

T = TypeVar("T")

REQUESTS_AT_ONCE = 32
"""Number of a rank's requests that wait for an answer; a server computes them together."""
ANSWER_SECONDS = 120.0
"""Seconds that one answer may take."""
RETRY_SECONDS = 2.0
PROBED_TOKENS = 1024
"""Number of token ids whose text is compared before the first sample is scored."""
MAX_ERROR_CHARACTERS = 300


class _TokenLogprob(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


class _CompletionChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


class _CompletionAnswer(msgspec.Struct):
    choices: Annotated[list[_CompletionChoice], msgspec.Meta(min_length=1)]


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: Annotated[list[_ModelCard], msgspec.Meta(min_length=1)]


class ServedTeacher:
    """The teacher behind `url`, for the ranks of a learner.

    Of the ranks that are given the same micro-batches one asks, and all get its answer: two answers
    to one question may differ in their last bits.

    Args:
        url: Address of the server's API, such as `http://HOST:8000/v1`. It serves one model.
        patience_seconds: Seconds for which a server that does not answer is asked again.
    """

    def __init__(self, url: str, ranks: RankGroup, patience_seconds: float):
        self._url = url.rstrip("/")
        self._ranks = ranks
        self._patience_seconds = patience_seconds
        self._model = ""

    def check_tokens(self, model_path: Path) -> None:
        """Raise `LearnerError` if the server does not answer, or if a token id stands for other text
        there than in the model of `model_path`. Asks about all special tokens and some others.
        Collective."""
        from tokenizers import Tokenizer

        error = ""
        if self._ranks.rank == 0:
            path = model_path / "tokenizer.json"
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception as raised:  # tokenizers raises nothing more precise
                error = f"{path}: {raised}"
            else:
                error = self._compare_tokens(tokenizer)
        error = self._ranks.all_gather(error)[0]
        if error:
            raise LearnerError(error)

    def _compare_tokens(self, tokenizer: Tokenizer) -> str:
        """Return what is wrong; "" if nothing is."""
        special = sorted(tokenizer.get_added_tokens_decoder())
        step = max(1, tokenizer.get_vocab_size() // PROBED_TOKENS)
        ids = [*special, *range(0, tokenizer.get_vocab_size(), step)][: 2 * PROBED_TOKENS]
        try:
            said = self._ask(ids)
        except LearnerError as error:
            return str(error)
        for token, entry in zip(ids[1:], said[1:], strict=True):
            text = tokenizer.decode([token], skip_special_tokens=False)
            theirs = entry.decoded_token
            # A part of a character has no text of its own.
            if theirs is not None and "\ufffd" not in text + theirs and text != theirs:
                return (
                    f"{self._name} has other tokens than the model: id {token} is {theirs!r} there "
                    f"and {text!r} here. It can judge only tokens of its own tokenizer"
                )
        return ""

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], *, replay: bool, trained_only: bool
    ) -> list[np.ndarray]:
        """Return the teacher's log-prob of every token, float32 `[T]` for each micro-batch; 0 for a
        sample's first token. Collective. Raises `LearnerError` if the server does not answer."""
        samples = {}
        if self._ranks.is_batch_reporter:
            for m in micro_batches:
                whole, edges = m.expanded_samples
                for index, name in enumerate(m.sample_ids):
                    rows = whole[edges[index] : edges[index + 1]]
                    samples[name] = m.table["token_ids"][rows].tolist()
        found, error = self._score(samples)
        parts = self._ranks.all_gather((found, error))
        for _, error in parts:
            if error:
                raise LearnerError(error)
        by_name = {name: values for part, _ in parts for name, values in part.items()}
        return [_lay_out(m, by_name) for m in micro_batches]

    def _score(self, samples: dict[str, list[int]]) -> tuple[dict[str, np.ndarray], str]:
        """Return the log-probs of each sample's tokens, and an error that all ranks have to raise."""

        def score(ids: list[int]) -> np.ndarray:
            return np.asarray([0.0, *(entry.logprob for entry in self._ask(ids)[1:])], np.float32)

        try:
            with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
                values = list(pool.map(score, samples.values()))
        except LearnerError as error:
            return {}, str(error)
        return dict(zip(samples, values, strict=True)), ""

    def _ask(self, ids: list[int]) -> list[_TokenLogprob]:
        """Return what the server says of each of `ids` after those before it; the first entry is
        without meaning. Raises `LearnerError`."""
        request = {
            "model": self._find_model(),
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        (choice, *_) = self._call("completions", request, _CompletionAnswer).choices
        said = choice.prompt_logprobs or []
        entries = [(each or {}).get(str(token)) for token, each in zip(ids, said, strict=False)]
        found = [entry or _TokenLogprob(np.nan) for entry in entries]
        if len(found) != len(ids) or not all(np.isfinite(entry.logprob) for entry in found[1:]):
            raise LearnerError(
                f"{self._name} does not give the log-prob of each token of a prompt: it must be "
                "vLLM's OpenAI server, or answer `prompt_logprobs` as that does"
            )
        return found

    def _find_model(self) -> str:
        if not self._model:
            served = [card.id for card in self._call("models", None, _ModelList).data]
            if len(served) > 1:
                raise LearnerError(
                    f"{self._name} serves {', '.join(served[:5])}: a teacher's server serves one"
                )
            self._model = served[0]
        return self._model

    @property
    def _name(self) -> str:
        return f"algorithm.distillation.teacher = {self._url!r}"

    def _call(self, path: str, body: dict[str, Any] | None, kind: type[T]) -> T:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(
            f"{self._url}/{path}", data, {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                    return decode_json(answer.read(), kind)
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")[:MAX_ERROR_CHARACTERS]
                reason = f"HTTP {error.code}: {said}"
                passes = error.code == http.HTTPStatus.TOO_MANY_REQUESTS or error.code >= 500
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or repr(error)
                passes = True
            except MalformedError as error:
                reason = str(error)
                passes = False
            if not passes or time.monotonic() > deadline:
                raise LearnerError(f"{self._name}: {reason}")
            time.sleep(RETRY_SECONDS)


def _lay_out(m: MicroBatch, by_name: dict[str, np.ndarray]) -> np.ndarray:
    """Return the log-probs of a micro-batch's rows, from those of its samples."""
    out = np.zeros(m.num_tokens, np.float32)
    whole, edges = m.expanded_samples
    for index, name in enumerate(m.sample_ids):
        out[whole[edges[index] : edges[index + 1]]] = by_name[name]
    return out
