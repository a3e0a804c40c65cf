"""The arguments of a user's reward function: each parameter gets what its name says, or the
function is refused.

Three forms are known by their names: TRL's, called with lists (`completions`), verl's
(`solution_str`), and the plain one, called with one answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from r3async.config import ConfigError

RewardForm = Literal["trl", "verl", "plain"]
Role = Literal["completion", "answer", "prompt", "row"]

TRL_TOKEN_ID_NAMES = ("completion_ids", "completions_ids")
"""Names of the argument for token ids of completions; TRL's page on GRPO used the second
before version 1."""
TRL_ARGUMENTS = ("prompts", "completions", *TRL_TOKEN_ID_NAMES, "log_metric")
TRL_UNSUPPORTED_ARGUMENTS = ("trainer_state", "environments", "log_extra")
"""Arguments that TRL's trainer passes to rewards and that do not exist here."""
TRL_RESERVED_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass to rewards."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

ROLES: Mapping[str, Role] = {
    **dict.fromkeys(
        (
            "completion",
            "response",
            "output",
            "prediction",
            "predict",
            "pred",
            "generation",
            "generated",
            "candidate",
        ),
        "completion",
    ),
    **dict.fromkeys(("response_str", "completion_str", "output_str", "predict_str"), "completion"),
    **dict.fromkeys(
        ("model_output", "model_answer", "model_response", "generated_text"), "completion"
    ),
    **dict.fromkeys(
        (
            "answer",
            "ground_truth",
            "reference",
            "expected",
            "label",
            "target",
            "gold",
            "truth",
            "gt",
            "correct_answer",
        ),
        "answer",
    ),
    **dict.fromkeys(
        ("reference_answer", "expected_answer", "gold_answer", "ground_truth_answer"), "answer"
    ),
    **dict.fromkeys(
        ("prompt", "question", "query", "problem", "instruction", "prompt_str"), "prompt"
    ),
    **dict.fromkeys(("row", "example"), "row"),
}
"""What a parameter of a plain reward is named for. Any other name says nothing, or is
that of a column."""
AMBIGUOUS_NAME = "solution"
"""A name for the answer where another parameter is the completion, and for the
completion where none is."""
COLUMN_NAMES = ("data_source", "extra_info", "reward_model", "info", "metadata")
"""Names of columns that other trainers pass to rewards, and that are nothing else."""
_BATCH_REMEDY = (
    "a reward gets one answer: write f(completion, answer), or as in TRL f(completions, **columns)"
)
_SLIME_REMEDY = (
    "that is slime's form: write f(completion, answer, row), where `completion` is "
    "sample.response, `answer` is sample.label, and `row` has all columns"
)
_VERIFIERS_REMEDY = (
    "that is of the form of verifiers: write f(completion, answer, row), or name the environment, "
    "`env.name` = verifiers:ID"
)
_EASYR1_REMEDY = "that is EasyR1's form: write f(completion, answer)"
FOREIGN_NAMES = {
    "sample": _SLIME_REMEDY,
    "samples": _SLIME_REMEDY,
    "args": _SLIME_REMEDY,
    "state": _VERIFIERS_REMEDY,
    "parser": _VERIFIERS_REMEDY,
    "judge": _VERIFIERS_REMEDY,
    "reward_input": _EASYR1_REMEDY,
    "reward_inputs": _EASYR1_REMEDY,
    **dict.fromkeys(
        ("queries", "labels", "questions", "answers", "responses", "outputs", "solutions"),
        _BATCH_REMEDY,
    ),
    **dict.fromkeys(("ground_truths", "predicts", "predictions", "rows"), _BATCH_REMEDY),
    **dict.fromkeys(("data_sources", "solution_strs", "extra_infos"), _BATCH_REMEDY),
}
"""Required parameters of other trainers' rewards that do not exist here, and what
to write instead."""


class PlainArguments(NamedTuple):
    """The roles and columns that the parameters of a plain reward get.

    Attributes:
        roles: The role of each parameter that has one, by its name.
        placed: Names of parameters that have their role by their place, because their
            names say nothing.
        columns: Names of columns that are required.
    """

    roles: Mapping[str, Role]
    placed: Sequence[str] = ()
    columns: Sequence[str] = ()


def get_signature(function: Callable[..., Any], path: str) -> inspect.Signature:
    """Return the signature of a reward. Raises `ConfigError` for a class, and for a
    function that has none."""
    if inspect.isclass(function):
        raise ConfigError(
            f"`reward` = {path!r} is a class: name an object of it, such as scorer = "
            f"{function.__name__}(…), or a function"
        )
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`reward` = {path!r} does not say which arguments it takes: write a "
            "function that calls it"
        ) from error


def find_form(signature: inspect.Signature) -> RewardForm:
    """Return the form of a reward by the names of its parameters."""
    names = list_named(signature)
    if "solution_str" in names:
        return "verl"
    if {"prompts", "completions", *TRL_TOKEN_ID_NAMES}.intersection(names):
        return "trl"
    return "trl" if not names and takes_any_name(signature) else "plain"


def list_named(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters, without `*args` and `**kwargs`."""
    return [
        p.name
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def list_required(signature: inspect.Signature) -> list[str]:
    return [
        name
        for name in list_named(signature)
        if signature.parameters[name].default is inspect.Parameter.empty
    ]


def takes_any_name(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def refuse_unknown_arguments(signature: inspect.Signature, path: str, form: RewardForm) -> None:
    """Raise `ConfigError` for a parameter of a reward in the form of verl or TRL that
    nothing is passed for."""
    required = list_required(signature)
    if form == "verl":
        unknown = [name for name in required if name not in VERL_ARGUMENTS]
        if unknown:
            raise ConfigError(
                f"`reward` = {path!r} asks for {unknown[0]!r}; a reward in verl's form gets "
                f"{', '.join(VERL_ARGUMENTS)}"
            )
    if form == "trl":
        lacking = [name for name in required if name in TRL_UNSUPPORTED_ARGUMENTS]
        if lacking:
            raise ConfigError(
                f"`reward` = {path!r} asks for `{lacking[0]}`, which only TRL's trainer has: "
                "give it a default"
            )
        single = [name for name in list_named(signature) if name in ("prompt", "completion")]
        if single:
            raise ConfigError(
                f"`reward` = {path!r} asks for `{single[0]}` beside lists: with lists, as in TRL, "
                f"it is `{single[0]}s`"
            )


def bind_plain_arguments(signature: inspect.Signature, path: str, name: str) -> PlainArguments:
    """Return what each parameter of a plain reward gets: by its name; or, if its name says nothing,
    by its place, the completion first and the answer second.

    Further parameters without a default are columns of the row. Raises `ConfigError` for a function
    that gets no completion, or that gets it twice.
    """
    named = list_named(signature)
    required = list_required(signature)
    roles: dict[str, Role] = {each: ROLES[each] for each in named if each in ROLES}
    columns = [each for each in required if each in COLUMN_NAMES or each in FOREIGN_NAMES]
    nameless = [each for each in required if each not in {*roles, *columns, AMBIGUOUS_NAME}]
    if AMBIGUOUS_NAME in named:
        is_answer = nameless or "completion" in roles.values()
        roles[AMBIGUOUS_NAME] = "answer" if is_answer else "completion"
    placed: list[str] = []
    for role in ("completion", "answer"):
        if role not in roles.values() and nameless:
            placed.append(nameless[0])
            roles[nameless.pop(0)] = role
    for role in ("answer", "prompt"):  # further names for the same are those of columns
        again = sorted(
            (each for each in roles if roles[each] == role), key=lambda each: each != role
        )[1:]
        columns += [each for each in again if each in required]
        roles = {each: kept for each, kept in roles.items() if each not in again}
    completions = [each for each, role in roles.items() if role == "completion"]
    if len(completions) != 1:
        foreign = next((FOREIGN_NAMES[each] for each in required if each in FOREIGN_NAMES), "")
        why = (
            f"{' and '.join(completions)} are both the completion"
            if completions
            else "no parameter is the completion"
        )
        raise ConfigError(
            f"`reward` = {path!r} is called `{name}{signature}`, and {why}: "
            + (
                foreign
                or (
                    "it must take (completion, answer), or (completion, row), or as in TRL "
                    "(completions, **columns), or as in verl (data_source, solution_str, "
                    "ground_truth, extra_info)"
                )
            )
        )
    return PlainArguments(roles, placed, [*columns, *nameless])


def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call `function` with those of `arguments` that it takes, each by its name, also where it can
    only be passed by its place."""
    signature = inspect.signature(function)
    bound = signature.bind_partial()
    bound.apply_defaults()
    taken = {name: value for name, value in arguments.items() if name in list_named(signature)}
    bound.arguments |= taken
    keywords = next(
        (p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None
    )
    if keywords is not None:
        bound.arguments[keywords] = {
            name: value for name, value in arguments.items() if name not in taken
        }
    return function(*bound.args, **bound.kwargs)
