"""Which policy version sampled which token of one engine call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens `start:stop` of one engine call came from weights `version`."""

    version: int
    start: int
    stop: int


class SpanRecorder:
    """Builds version spans of one running request; the engine stamps it while paused for an update."""

    def __init__(self, version: int):
        self._version = version
        self._start = 0
        self._spans: list[VersionSpan] = []

    def stamp(self, tokens_so_far: int, new_version: int) -> None:
        """Tokens sampled from here on come from `new_version`. Raises `ValueError` if versions or counts go backwards."""
        if new_version < self._version or tokens_so_far < self._start:
            raise ValueError(
                f"version span goes backwards: version {self._version} -> {new_version}, token {self._start} -> {tokens_so_far}"
            )
        if tokens_so_far > self._start:
            self._spans.append(VersionSpan(self._version, self._start, tokens_so_far))
        self._start, self._version = tokens_so_far, new_version

    def finish(self, tokens: int) -> list[VersionSpan]:
        """All spans, covering `0..tokens` without gap."""
        if tokens < self._start:
            raise ValueError(f"{tokens} tokens, but a span already ends at {self._start}")
        if tokens == self._start:
            return list(self._spans)
        return [*self._spans, VersionSpan(self._version, self._start, tokens)]


def expand(spans: Sequence[VersionSpan], length: int) -> np.ndarray:
    """int32 `[length]` of versions. Raises `ValueError` unless the spans cover `0..length` in order, without gap."""
    out = np.empty(length, np.int32)
    at = 0
    for span in spans:
        if span.start != at or span.stop <= span.start or span.stop > length:
            raise ValueError(f"version spans {list(spans)} do not cover {length} tokens in order")
        out[span.start : span.stop] = span.version
        at = span.stop
    if at != length:
        raise ValueError(f"version spans {list(spans)} cover {at} of {length} tokens")
    return out
