"""What a request may ask of the chat template: variables that it has, which change the prompt and nothing of the sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3async.rollout.agents.protocol import ApiError
from r3async.rollout.chat import ChatRenderer, TemplateError

EFFORT_VARIABLE, THINKING_VARIABLE = "reasoning_effort", "enable_thinking"
"""Variables by which templates know how long, or whether, the model is to think."""


def add_reasoning_effort(template_args: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Variables that a request names, with its `effort` of reasoning; those that are None it leaves to the episode."""
    named = {**template_args, EFFORT_VARIABLE: effort if effort is not None else template_args.get(EFFORT_VARIABLE)}
    return {name: value for name, value in named.items() if value is not None}


def apply_template_args(renderer: ChatRenderer, template_args: Mapping[str, Any]) -> ChatRenderer:
    """`renderer` with these variables beside the episode's. Without an effort in the template, `none` is no thinking. Raises
    `ApiError` for what the template does not know."""
    wanted, known = dict(template_args), renderer.template_variables
    if wanted.get(EFFORT_VARIABLE) == "none" and EFFORT_VARIABLE not in known and THINKING_VARIABLE in known:
        del wanted[EFFORT_VARIABLE]
        wanted = {THINKING_VARIABLE: False, **wanted}
    try:
        return renderer.with_template_args(wanted)
    except TemplateError as error:
        raise ApiError(
            f"{', '.join(f'{name} = {value!r}' for name, value in template_args.items())}: {error}. Leave it out.",
            param=min(wanted),
            code="unsupported_value",
        ) from error
