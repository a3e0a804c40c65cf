"""Checks that engine and learner treat a conversation alike: template, end-of-answer
tokens, and loss mask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from r3async.data.tokens import TokenTable
from r3async.envs import Message

from .judge import Divergence

TEST_CONVERSATION = (
    Message("system", "Answer."),
    Message("user", "What is 2 + 2?"),
    Message("assistant", "4"),
    Message("user", "And 3 + 3?"),
)


def check_tokens(start_model: Path, model: Path) -> Iterator[Divergence]:
    """Check that a model and its start model render a conversation alike and end answers with
    the same tokens."""
    from r3async.rollout.renderer import ChatRenderer, TemplateError

    if start_model == model:
        return
    try:
        theirs = ChatRenderer.from_model(start_model)
        ours = ChatRenderer.from_model(model)
    except (TemplateError, OSError, ValueError):
        return  # a model without a template is sampled from token ids
    for messages in (TEST_CONVERSATION, TEST_CONVERSATION[1:]):
        try:
            ids = [renderer.encode(renderer.render(messages)) for renderer in (theirs, ours)]
        except TemplateError:
            continue
        if ids[0] != ids[1]:
            at = next(
                (i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b),
                min(map(len, ids)),
            )
            evidence = (
                f"a conversation of {len(messages)} messages has {len(ids[0])} tokens in "
                f"{start_model}, {len(ids[1])} in {model}; the "
                f"first difference is at {at}: {theirs.decode(ids[0][at : at + 4])!r} and "
                f"{ours.decode(ids[1][at : at + 4])!r}"
            )
            yield Divergence(
                "engine",
                "tokens",
                [-1],
                compared="the chat template of both model directories, on one conversation",
                evidence=evidence,
                hint="serve the model with the chat template and tokenizer it was trained with",
            )
            break
    if set(theirs.stop_token_ids) != set(ours.stop_token_ids):
        ends = sorted(theirs.stop_token_ids), sorted(ours.stop_token_ids)
        yield Divergence(
            "engine",
            "tokens",
            [-1],
            compared="the tokens that end an answer, of both model directories",
            evidence=f"answers end with {ends[0]} in {start_model}, and with {ends[1]} in {model}",
            hint="compare eos_token_id in generation_config.json and the tokenizer of both",
        )


def check_masks(run: Path, start_model: Path) -> Iterator[Divergence]:
    """Check that a recorded run trains the token that ends an answer wherever it trains the
    token before it."""
    from r3async.record.recording import RecordingError, find_recorded_steps, read_recorded_step
    from r3async.rollout.renderer import ChatRenderer, TemplateError

    try:
        files = find_recorded_steps(run)
        ends = ChatRenderer.from_model(start_model).stop_token_ids
    except (RecordingError, TemplateError, OSError, ValueError):
        return
    step, groups = read_recorded_step(files[-1])
    tables = [
        sample.table for group in groups for trajectory in group for sample in trajectory.samples
    ]
    masked, seen = count_untrained_ends(tables, ends)
    if masked:
        yield Divergence(
            "engine",
            "mask",
            [-1],
            compared="the loss mask of each answer's end, with that of the token before it",
            evidence=(
                f"in step {step.step} {masked} of {seen} answers end with a token that was sampled "
                "and is not trained"
            ),
            hint="the loss mask must cover the stop token: a policy learns there when to stop",
        )


def count_untrained_ends(tables: list[TokenTable], ends: tuple[int, ...]) -> tuple[int, int]:
    """Count the answers that end with one of `ends`.

    Return the number whose end is not trained although the token before it is, and
    the number of all.
    """
    masked = seen = 0
    for table in tables:
        sampled = table["policy_version"] >= 0
        trained = table["loss_mask"]
        end = sampled & np.isin(table["token_ids"], ends)
        at = np.flatnonzero(end[1:] & sampled[:-1] & (table["turn"][1:] == table["turn"][:-1])) + 1
        seen += int(trained[at - 1].sum())
        masked += int((trained[at - 1] & ~trained[at]).sum())
    return masked, seen
