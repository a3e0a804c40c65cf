"""`r3async diagnose`: from a run or a model directory to a diagnosis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from r3async.config import Config, ConfigError, load_config
from r3async.config.read import Overrides, with_overrides
from r3async.learner import build_learner
from r3async.rollout.engines import build_engine
from r3async.tools.diagnose.diagnosis import Diagnosis, compare
from r3async.tools.diagnose.reference import Reference
from r3async.tools.diagnose.tokens import other_masks, other_tokens
from r3async.tools.diagnose.witnesses import PROMPT, EngineSide, alone, engine_witness, learner_witness, unlike_files
from r3async.untrusted import decode_python_json
from r3async.weights.probe import KEPT, probe_text

Say = Callable[[str], object]


class Patient(NamedTuple):
    """`model`: the directory whose weights are compared. `start`: what the run's engines began with, and have their tokenizer
    from. `run`: if it is one."""

    model: Path
    start: Path
    config: Config
    run: Path | None = None


def find_patient(name: str, preset: str | None, overrides: Overrides, scratch: Path, say: Say, root: Path) -> Patient:
    """A model directory; or a run, with the version that a probe failed with if that ended it, or its newest model: what it saved
    at its end, its newest checkpoint, or its start model.

    Raises `ConfigError` or `CheckpointError`.
    """
    from r3async.tools.inspect.run import InspectError, find_run

    directory = Path(name)
    if (directory / "config.json").is_file():
        config = with_overrides(load_config(preset, command=None) if preset else Config(), overrides)
        return Patient(directory.absolute(), directory.absolute(), _within(config, directory))
    try:
        run = find_run(name, root)
    except InspectError as error:
        raise ConfigError(
            f"RUN_OR_MODEL = {name!r} is no model directory (no config.json in it), and {error}"
        ) from error
    base = with_overrides(load_config(preset or str(run / "config.toml"), command=None), overrides)
    start = Path(base.model.path) if base.model.path else run / "init"
    if not (start / "config.json").is_file():
        raise ConfigError(f"the start model of {run} is not in {start}: name a model directory instead")
    kept, model = run / KEPT, run / "model"
    if (kept / "config.json").is_file():
        say(f"the version that the probe failed with, from {kept}")
        model = kept
    elif not (model / "config.json").is_file():
        model = _exported(run, scratch, say) or start
    return Patient(model.absolute(), start.absolute(), _within(base, start), run)


def _exported(run: Path, scratch: Path, say: Say) -> Path | None:
    from r3async.checkpoint import Checkpoints
    from r3async.tools.export import export

    if not any((run / "checkpoints").glob("step-*")) and not Checkpoints(run / "checkpoints").steps():
        return None
    opened = export(run, scratch / "model")
    say(f"the weights after step {opened.state.steps}, from {opened.path}")
    return scratch / "model"


def _within(config: Config, model: Path) -> Config:
    """With no more tokens than the model has positions."""
    positions = decode_python_json((model / "config.json").read_bytes()).get("max_position_embeddings")
    longest = min(config.episode.max_total_tokens, positions or config.episode.max_total_tokens)
    if longest == config.episode.max_total_tokens:
        return config
    shorter = {"max_total_tokens": longest, "max_prompt_tokens": min(config.episode.max_prompt_tokens, longest // 2)}
    return msgspec.structs.replace(config, episode=msgspec.structs.replace(config.episode, **shorter))


def prompt_of(model: Path, config: Config, vocabulary: int) -> np.ndarray:
    """int32 `[T]`: the text of the probe as the model's tokenizer has it; of a model without one, ids at random."""
    longest = max(2, min(PROMPT, config.episode.max_total_tokens // 2))
    try:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(model).encode(probe_text(4 * PROMPT), add_special_tokens=False)
    except Exception:  # whatever a tokenizer's files may raise
        ids = np.random.default_rng(0).integers(0, vocabulary, PROMPT).tolist()
    return np.asarray(ids[:longest], np.int32)


async def _engine_side(
    config: Config, start: Path, tensors: Mapping[str, Any], prompt: np.ndarray, scratch: Path, say: Say
) -> EngineSide:
    engine = build_engine(config, str(start), config.seed)
    try:
        await engine.start()
        return await engine_witness(engine, config, tensors, prompt, scratch, say=say)
    finally:
        await engine.stop()


def diagnose(patient: Patient, scratch: Path, say: Say = lambda line: None) -> Diagnosis:
    """Load both, feed them the same tokens, and compare every stage with the files.

    `scratch`: an empty directory. Raises `ConfigError`, `LearnerError`, `EngineError` or `WeightError`.
    """
    began, config = time.monotonic(), alone(patient.config)
    before = [
        *other_tokens(patient.start, patient.model),
        *(other_masks(patient.run, patient.start) if patient.run else ()),
    ]
    say("loading the files and the learner")
    reference = Reference(patient.model)
    learner: Any = build_learner(config, patient.model, frozen=True)
    try:
        tensors = learner.export()
        stale = unlike_files(tensors, patient.model, config.learner.dtype)
        say("starting vLLM")
        prompt = prompt_of(patient.start, config, learner.vocab_size)
        side = asyncio.run(_engine_side(config, patient.start, tensors, prompt, scratch, say))
        say("what the learner computes")
        mine = learner_witness(learner, side.tokens, stale, config)
    finally:
        learner.close()
    say("comparing")
    difference = (side.witness.logprobs - mine.logprobs).abs()
    return Diagnosis(
        model=str(patient.model),
        backend=config.learner.backend,
        tokens=len(difference),
        mean_difference=float(difference.mean()),
        max_difference=float(difference.max()),
        stages=len(side.witness.seen) + len(mine.seen),
        partings=compare(reference, side.witness, mine, before),
        seconds=time.monotonic() - began,
    )
