"""What a request may ask of the chat template: variables that it has, which change the prompt and nothing of the sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3async.rollout.agents.protocol import Refused
from r3async.rollout.chat import ChatRenderer, TemplateError

EFFORT, THINKING = "reasoning_effort", "enable_thinking"
"""Variables by which templates know how long, or whether, the model is to think."""


def with_effort(template_args: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Variables that a request names, with its `effort` of reasoning; those that are None it leaves to the episode."""
    named = {**template_args, EFFORT: effort if effort is not None else template_args.get(EFFORT)}
    return {name: value for name, value in named.items() if value is not None}


def rendering(renderer: ChatRenderer, template_args: Mapping[str, Any]) -> ChatRenderer:
    """`renderer` with these variables beside the episode's. Without an effort in the template, `none` is no thinking. Raises
    `Refused` for what the template does not know."""
    wanted, known = dict(template_args), renderer.variables
    if wanted.get(EFFORT) == "none" and EFFORT not in known and THINKING in known:
        del wanted[EFFORT]
        wanted = {THINKING: False, **wanted}
    try:
        return renderer.with_args(wanted)
    except TemplateError as error:
        raise Refused(
            f"{', '.join(f'{name} = {value!r}' for name, value in template_args.items())}: {error}. Leave it out.",
            param=min(wanted),
            code="unsupported_value",
        ) from error
