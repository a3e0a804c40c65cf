"""Variables of the chat template that a request may set: they change the prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3async.rollout.endpoint.protocol import ApiError
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.untrusted import format_value

EFFORT_VARIABLE = "reasoning_effort"
THINKING_VARIABLE = "enable_thinking"
"""Template variables that control how long the model thinks, and whether it thinks at all."""


def add_reasoning_effort(template_args: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Return a request's template variables with its reasoning `effort`, without
    those that are None.

    A variable that is None keeps the episode's value.
    """
    named = {
        **template_args,
        EFFORT_VARIABLE: effort if effort is not None else template_args.get(EFFORT_VARIABLE),
    }
    return {name: value for name, value in named.items() if value is not None}


def apply_template_args(renderer: ChatRenderer, template_args: Mapping[str, Any]) -> ChatRenderer:
    """Return `renderer` with these variables in addition to the episode's.

    If the template has no variable for the effort, an effort of `none` turns thinking off. Raises
    `ApiError` for variables that the template does not know.
    """
    wanted = dict(template_args)
    known = renderer.template_variables
    if (
        wanted.get(EFFORT_VARIABLE) == "none"
        and EFFORT_VARIABLE not in known
        and THINKING_VARIABLE in known
    ):
        del wanted[EFFORT_VARIABLE]
        wanted = {THINKING_VARIABLE: False, **wanted}
    try:
        return renderer.with_template_args(wanted)
    except TemplateError as error:
        raise ApiError(
            (
                f"{', '.join(f'{name} = {format_value(value)}' for name, value in template_args.items())}: "
                f"{error}. Leave it out."
            ),
            param=min(wanted),
            code="unsupported_value",
        ) from error
