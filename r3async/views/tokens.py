"""The text of a run's tokens, and what each of them is in its conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from r3async.record.reading import read_run_config


class RunTokenizer:
    """The text of single tokens, and the end-of-sequence token, of a run's model; ids alone if there is no tokenizer."""

    def __init__(self, run_dir: Path):
        self._decode: Callable[[int], str] = lambda token: f"#{token}"
        self.end_id: int | None = None
        path = read_run_config(run_dir).get("model", {}).get("path")
        for directory in [run_dir / "init", *([Path(path)] if path else []), run_dir / "model"]:
            if (directory / "tokenizer.json").is_file():
                self._read(directory)
                return

    def _read(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Reader

        reader = Reader.from_file(str(directory / "tokenizer.json"))
        self._decode = lambda token: reader.decode([token], skip_special_tokens=False)
        described = directory / "tokenizer_config.json"
        end = json.loads(described.read_text()).get("eos_token") if described.is_file() else None
        end = end.get("content") if isinstance(end, dict) else end
        self.end_id = reader.token_to_id(end) if end else None

    def text(self, token: int) -> str:
        return self._decode(token)


def roles(tokens: np.ndarray, loss_mask: np.ndarray, end_id: int | None) -> list[str]:
    """Of each token: prompt, sampled, observation, or injected. An end of sequence that follows a sampled token which is
    none itself was injected."""
    sampled_at = np.flatnonzero(loss_mask)
    first = int(sampled_at[0]) if len(sampled_at) else len(tokens)
    found = []
    for at, token in enumerate(tokens):
        if loss_mask[at]:
            found.append("sampled")
        elif at < first:
            found.append("prompt")
        elif token == end_id and loss_mask[at - 1] and tokens[at - 1] != end_id:
            found.append("injected")
        else:
            found.append("observation")
    return found
