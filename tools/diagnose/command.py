"""The command `r3async diagnose`: from a run or a model directory to a diagnosis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from r3async.config import Config, ConfigError, load_config
from r3async.config.load import Overrides, apply_overrides
from r3async.data.checkpoint_forms import read_quantized_form
from r3async.data.model_shape import take_text_config
from r3async.learner import build_learner
from r3async.rollout import build_engine
from r3async.rollout.renderer import encode_plain
from r3async.untrusted import decode_python_json
from r3async.weights.probe import FAILED_MODEL_DIRECTORY, make_probe_text

from .diagnosis import Diagnosis, compare_sides
from .reference import ReferenceModel
from .tokens import check_masks, check_tokens
from .witnesses import (
    PROMPT_TOKENS,
    EngineOutputs,
    find_changed_tensors,
    observe_engine,
    observe_learner,
    to_single_rank,
)

PrintLine = Callable[[str], object]


class DiagnosisTarget(NamedTuple):
    """The model to diagnose.

    Attributes:
        model: The directory whose weights are compared.
        start_model: The model that the run's engines started with, which also provides
            their tokenizer.
        run: The run's directory, if the target is a run.
    """

    model: Path
    start_model: Path
    config: Config
    run: Path | None = None


def find_diagnosis_target(
    name: str,
    preset: str | None,
    overrides: Overrides,
    scratch: Path,
    print_line: PrintLine,
    root: Path,
) -> DiagnosisTarget:
    """Find a model directory, or the model of a run.

    The model of a run is the version that a failed probe kept, if that ended the run; otherwise its
    newest model: the one saved at its end, its newest checkpoint, or its start model.

    Raises `ConfigError` or `CheckpointError`.
    """
    from ..inspect.run import InspectError, find_run

    directory = Path(name)
    if (directory / "config.json").is_file():
        config = apply_overrides(
            load_config(preset, command=None) if preset else Config(), overrides
        )
        return DiagnosisTarget(
            directory.absolute(), directory.absolute(), _limit_tokens(config, directory)
        )
    try:
        run = find_run(name, root)
    except InspectError as error:
        raise ConfigError(
            f"RUN_OR_MODEL = {name!r} is no model directory (no config.json in it), and {error}"
        ) from error
    base = apply_overrides(load_config(preset or str(run / "config.toml"), command=None), overrides)
    start = Path(base.model.path) if base.model.path else run / "init"
    if not (start / "config.json").is_file():
        raise ConfigError(
            f"the start model of {run} is not in {start}: name a model directory instead"
        )
    kept = run / FAILED_MODEL_DIRECTORY
    model = run / "model"
    if (kept / "config.json").is_file():
        print_line(f"the version that the probe failed with, from {kept}")
        model = kept
    elif not (model / "config.json").is_file():
        model = _export_newest(run, scratch, print_line) or start
    return DiagnosisTarget(model.absolute(), start.absolute(), _limit_tokens(base, start), run)


def _export_newest(run: Path, scratch: Path, print_line: PrintLine) -> Path | None:
    from r3async.checkpoint import CheckpointDirectory

    from ..export import export_model

    if (
        not any((run / "checkpoints").glob("step-*"))
        and not CheckpointDirectory(run / "checkpoints").list_steps()
    ):
        return None
    opened = export_model(run, scratch / "model")
    print_line(f"the weights after step {opened.state.steps}, from {opened.path}")
    return scratch / "model"


def _limit_tokens(config: Config, model: Path) -> Config:
    """Limit the episode's tokens to the number of positions of the model."""
    described = decode_python_json((model / "config.json").read_bytes())
    positions = take_text_config(described).get("max_position_embeddings")
    longest = min(config.episode.max_total_tokens, positions or config.episode.max_total_tokens)
    if longest == config.episode.max_total_tokens:
        return config
    shorter = {
        "max_total_tokens": longest,
        "max_prompt_tokens": min(config.episode.max_prompt_tokens, longest // 2),
    }
    return msgspec.structs.replace(
        config, episode=msgspec.structs.replace(config.episode, **shorter)
    )


def make_prompt(model: Path, config: Config, vocabulary: int) -> np.ndarray:
    """Return the probe's text in the model's tokens, int32 `[T]`; random ids for a model
    without a tokenizer."""
    longest = max(2, min(PROMPT_TOKENS, config.episode.max_total_tokens // 2))
    try:
        from transformers import AutoTokenizer

        ids = encode_plain(AutoTokenizer.from_pretrained(model), make_probe_text(4 * PROMPT_TOKENS))
    except Exception:  # whatever a tokenizer's files may raise
        ids = np.random.default_rng(0).integers(0, vocabulary, PROMPT_TOKENS).tolist()
    return np.asarray(ids[:longest], np.int32)


async def _run_engine(
    config: Config,
    start_model: Path,
    tensors: Mapping[str, Any],
    prompt: np.ndarray,
    scratch: Path,
    print_line: PrintLine,
    carried: Sequence[str],
) -> EngineOutputs:
    engine = build_engine(config, str(start_model), config.seed)
    try:
        await engine.start()
        return await observe_engine(
            engine, config, tensors, prompt, scratch, print_line=print_line, carried=carried
        )
    finally:
        await engine.stop()


def run_diagnosis(
    target: DiagnosisTarget, scratch: Path, print_line: PrintLine = lambda line: None
) -> Diagnosis:
    """Load engine and learner, feed them the same tokens, and compare every stage with the files.

    Args:
        scratch: An empty directory.

    Raises `ConfigError`, `LearnerError`, `EngineError` or `WeightError`.
    """
    began = time.monotonic()
    config = to_single_rank(target.config)
    before = [
        *check_tokens(target.start_model, target.model),
        *(check_masks(target.run, target.start_model) if target.run else ()),
    ]
    print_line("loading the files and the learner")
    learner: Any = build_learner(config, target.model, frozen=True)
    try:
        start_model = target.start_model
        described = decode_python_json((start_model / "config.json").read_bytes())
        if read_quantized_form(described) is not None:
            start_model = scratch / "dequantized"
            learner.save_pretrained(start_model)
        reference = ReferenceModel(
            start_model if target.model == target.start_model else target.model
        )
        tensors = learner.export_weights()
        stale = find_changed_tensors(tensors, target.model, config.learner.dtype)
        print_line("starting vLLM")
        prompt = make_prompt(target.start_model, config, learner.vocab_size)
        side = asyncio.run(
            _run_engine(config, start_model, tensors, prompt, scratch, print_line, learner.carried)
        )
        print_line("what the learner computes")
        mine = observe_learner(learner, side.tokens, stale, config)
    finally:
        learner.close()
    print_line("comparing")
    difference = (side.outputs.logprobs - mine.logprobs).abs()
    return Diagnosis(
        model=str(target.model),
        backend=config.learner.backend,
        tokens=len(difference),
        mean_difference=float(difference.mean()),
        max_difference=float(difference.max()),
        stages=len(side.outputs.tensors) + len(mine.tensors),
        divergences=compare_sides(reference, side.outputs, mine, before),
        seconds=time.monotonic() - began,
    )
