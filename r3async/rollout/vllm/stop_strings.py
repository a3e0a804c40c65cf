"""Stop strings in vLLM's engine core: an answer ends with the token that completes one.

vLLM looks for them when it detokenises, outside the core, which has continued meanwhile. Here whole
answers leave the core, so the core itself looks for them. All tokens up to and including the last
one were sampled, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from vllm.v1.request import RequestStatus

from r3async.rollout.vllm.messages import STOP_STRINGS_KEY


class StopStringMatcher:
    """A matcher of stop strings in one answer. It keeps only the end of the text that may
    begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]):
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._tail_length = max(map(len, self._stop_strings)) - 1
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail = ""

    def add_token(self, token_id: int) -> str | None:
        """Add the next token and return the stop string that it completes, or None.

        A character of several tokens counts with its last token.
        """
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokens that do not decode to text together
            self._stream = DecodeStream(skip_special_tokens=False)
            piece = None
        text = self._tail + (piece or "")
        self._tail = (
            text[len(text) - self._tail_length :] if len(text) > self._tail_length else text
        )
        return next((stop for stop in self._stop_strings if stop in text), None) if piece else None


class StopStringsMixin:
    """A mixin of vLLM's scheduler that ends answers at stop strings."""

    vllm_config: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._stop_matchers: dict[str, StopStringMatcher] = {}
        self._tokenizer: Tokenizer | None = None

    def _update_request_with_output(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, *args, **kwargs)  # type: ignore[misc]
        extra = request.sampling_params.extra_args
        stop = extra.get(STOP_STRINGS_KEY) if extra else None
        if not stop:
            return tokens, stopped
        text = self._stop_matchers.get(request.request_id)
        if text is None:
            text = self._stop_matchers[request.request_id] = StopStringMatcher(
                self._load_tokenizer(), stop
            )
        # The token at the length limit may complete a stop string too: then the string ended the
        # answer, as in vLLM.
        for token in (
            tokens if not stopped or request.status == RequestStatus.FINISHED_LENGTH_CAPPED else ()
        ):
            found = text.add_token(token)
            if found is not None:
                # As vLLM does with a stop token. A step samples one token, so none follows.
                request.status = RequestStatus.FINISHED_STOPPED
                request.stop_reason = found
                stopped = True
        if stopped:
            del self._stop_matchers[request.request_id]
        return tokens, stopped

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in finished:
            self._stop_matchers.pop(request.request_id, None)
        return finished

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(
                str(Path(self.vllm_config.model_config.model) / "tokenizer.json")
            )
        return self._tokenizer
