"""Renders messages by a model's chat template, and encodes and decodes their text."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2.meta
import jinja2.sandbox
import msgspec
import numpy as np

from r3async.envs import REASONING_KEYS, Message
from r3async.rollout.call_forms import (
    CALL_FORMS,
    PROBE_TOOL,
    CallForm,
    describe_odd_arguments,
    describe_unwritten_call,
    detect_call_form,
)
from r3async.rollout.growing_text import TemplateAnalysis

CACHE_ENTRIES = 32
"""Number of cached token sequences of texts, and of cached texts of conversation beginnings."""
MAX_CACHED_MESSAGES = 3
"""Largest number of messages of a conversation beginning whose text is cached."""
NONDETERMINISTIC_NAMES = ("strftime_now", "now(", "random", "uuid")
"""Names by which a template is recognised whose text changes with time or at random."""
_PROBE_ANSWER = "quokka"
_PROBE_NEXT = "wombat"
"""Message contents that are looked for in a template's text."""


class TemplateError(ValueError):
    """A tokenizer or chat template that cannot be used."""


class TextTooLongError(ValueError):
    """A prompt's text that exceeds the limit of tokens however it is tokenised; it
    was not tokenised."""

    def __init__(self, characters: int, max_tokens: int):
        super().__init__(f"{characters} characters are more than {max_tokens} tokens")
        self.characters = characters


def read_generation_stops(path: str | Path) -> list[int]:
    """Return the tokens that end an answer by a model directory's generation_config.json."""
    from transformers import GenerationConfig

    if not (Path(path) / "generation_config.json").is_file():
        return []
    eos = GenerationConfig.from_pretrained(path).eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


class ChatRenderer:
    """A tokenizer with its chat template, and the tokens that end an answer.

    An answer ends with the tokenizer's end-of-sequence token, one of `stop_token_ids`, or the token
    that the template writes after answers. Raises `TemplateError` for a tokenizer that has no
    template or no end-of-sequence token, or whose template fails on one plain message.

    Args:
        tokenizer: A tokenizer of transformers, with a chat template and an end-of-sequence token.
        template_args: Further variables of the template (`{"enable_thinking": False}`).
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int] = (),
        template_args: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.template_args = dict(template_args or {})
        if tokenizer.chat_template is None:
            raise TemplateError(
                "the tokenizer has no chat template; add chat_template.jinja to the model directory"
            )
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-sequence token")
        self.eos_token_id: int = tokenizer.eos_token_id
        self.max_token_characters = max(map(len, tokenizer.get_vocab()), default=1)
        """Largest number of characters for which one token may stand."""
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else "\n".join(template.values())
        self.template_analysis = TemplateAnalysis(self._template)
        """Properties of the template, as far as its conversations have shown them."""
        # The episodes of a group begin with the same prompt, at about the same time.
        self._reads_thoughts = (
            re.search(rf"""['".]({"|".join(REASONING_KEYS)})\b""", self._template) is not None
        )
        self._is_nondeterministic = any(name in str(template) for name in NONDETERMINISTIC_NAMES)
        self._render_cached = functools.lru_cache(CACHE_ENTRIES)(self._render_plain)
        self.encode_cached = functools.lru_cache(CACHE_ENTRIES)(self._encode_readonly)
        """Function that returns the tokens of a text, int32 `[T]`, read-only. Special tokens in the
        text are recognised, none is added."""
        self._renderers_by_args: dict[bytes, ChatRenderer] = {}
        self._call_forms: dict[bool, CallForm | None] = {}
        """Form in which the template writes calls, without and with tools; None
        if it writes none."""
        self._render_plainly = _compile_for_plain_messages(tokenizer, self.template_args)
        self._backend = _find_plain_backend(tokenizer)
        self.render([Message("user", "hello")])
        ends = [self.eos_token_id, *stop_token_ids]
        own = self._find_end_token([self.decode([token]) for token in ends])
        if own:
            ends.append(tokenizer.convert_tokens_to_ids(own))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._stop_texts = {i: self.decode([i]) for i in self.stop_token_ids}
        texts = sorted(filter(None, self._stop_texts.values()), key=len, reverse=True)
        self.stop_pattern = re.compile("|".join(map(re.escape, texts)))
        """Pattern that matches the texts of the stop tokens."""

    @functools.cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables of the template that `template_args` may set."""
        theirs = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return find_template_variables(self._template) - {
            *theirs,
            *self.tokenizer.special_tokens_map,
        }

    def with_template_args(self, args: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer of the same tokenizer with `args` in addition to `template_args`.

        Raises `TemplateError` for a variable that the template does not have, or refuses.
        """
        args = {
            name: value for name, value in args.items() if self.template_args.get(name) != value
        }
        if not args:
            return self
        unknown = sorted(set(args) - self.template_variables)
        if unknown:
            known = (
                f"only {', '.join(sorted(self.template_variables))}"
                if self.template_variables
                else "and no other"
            )
            raise TemplateError(f"the chat template has no variable {unknown[0]!r}, {known}")
        key = msgspec.json.encode(args, order="sorted")
        if key not in self._renderers_by_args:
            other = copy.copy(self)
            other.template_args = {**self.template_args, **args}
            other.template_analysis = TemplateAnalysis(self._template)
            other._renderers_by_args = {}
            other._call_forms = {}
            other._render_plainly = _compile_for_plain_messages(
                other.tokenizer, other.template_args
            )
            other._render_cached = functools.lru_cache(CACHE_ENTRIES)(other._render_plain)
            other.render([Message("user", "hello")])
            while len(self._renderers_by_args) >= CACHE_ENTRIES:
                self._renderers_by_args.pop(next(iter(self._renderers_by_args)))
            self._renderers_by_args[key] = other
        return self._renderers_by_args[key]

    @classmethod
    def from_model(
        cls, path: str | Path, template_args: Mapping[str, Any] | None = None
    ) -> ChatRenderer:
        """Return a renderer with the tokenizer and the stop tokens of a model directory."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(tokenizer, read_generation_stops(path), template_args)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the template's text with the generation prompt.

        Raises `TemplateError` with the template's own error.
        """
        if self._is_nondeterministic or tools or len(messages) > MAX_CACHED_MESSAGES:
            return self._apply_template(messages, tools)
        if any(m != Message(m.role, m.content) for m in messages):
            return self._apply_template(messages, tools)
        return self._render_cached(*((m.role, m.content) for m in messages))

    def _render_plain(self, *messages: tuple[str, str]) -> str:
        return self._apply_template([Message(role, content) for role, content in messages], ())

    def render_finished(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the template's text of a finished conversation, with no generation prompt. Raises
        `TemplateError`."""
        return self._apply_template(messages, tools, add_generation_prompt=False)

    def find_answer_end(self, role: str = "") -> str:
        """Return the template's text behind an answer, up to and including its first special token.

        The answer is followed by a message of `role`, or by none. Returns "" if the template writes
        other text there, or refuses such messages.
        """
        return self.match_special_token(self._render_behind_answer(role))

    def _find_end_token(self, stop_texts: Sequence[str]) -> str:
        """Return the token with which the template ends an answer; "" if the template writes one of
        `stop_texts` there."""
        between = self._render_behind_answer("user")
        own = (
            self.match_special_token(self._render_behind_answer())
            or self.match_special_token(between)
        ).strip()
        return "" if own in stop_texts or any(end in between for end in stop_texts) else own

    def _render_behind_answer(self, role: str = "") -> str:
        """Return the template's text between an answer and the content of a following message of
        `role`, or the end."""
        behind = [Message(role, _PROBE_NEXT)] if role else []
        try:
            text = self.render_finished(
                [Message("user", "hello"), Message("assistant", _PROBE_ANSWER), *behind]
            )
        except TemplateError:
            return ""
        _, found, rest = text.rpartition(_PROBE_ANSWER)
        return rest.partition(_PROBE_NEXT)[0] if found else ""

    def match_special_token(self, text: str) -> str:
        """Return the special token with which `text` begins, with white space before it; ""
        if there is none."""
        rest = text.lstrip()
        found = max(
            (token for token in self.tokenizer.get_added_vocab() if rest.startswith(token)),
            key=len,
            default="",
        )
        return text[: len(text) - len(rest)] + found if found else ""

    def _apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> str:
        if not self._reads_thoughts and any(m.reasoning_content for m in messages):
            raise TemplateError(
                f"the chat template reads no `{REASONING_KEYS[0]}`: write the thought into "
                "`content`, as the model is to say it"
            )
        if not any(message.tool_calls for message in messages):
            return self._render_form(messages, tools, CALL_FORMS[0], add_generation_prompt)
        form = self._find_call_form(bool(tools))

        def render(shown: Sequence[Message], form: CallForm) -> str:
            return self._render_form(shown, tools, form, add_generation_prompt)

        text = render(messages, form or CALL_FORMS[0])
        unwritten = describe_unwritten_call(messages, text, form, render)
        if unwritten:
            raise TemplateError(unwritten)
        return text

    def _find_call_form(self, has_tools: bool) -> CallForm | None:
        """Return the form in which the template writes calls, without or with tools; None
        if it writes none."""
        if has_tools not in self._call_forms:
            tools = [PROBE_TOOL] if has_tools else []
            self._call_forms[has_tools] = detect_call_form(
                lambda *asked: self._render_form(asked[0], tools, asked[1])
            )
        return self._call_forms[has_tools]

    def _render_form(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        form: CallForm,
        add_generation_prompt: bool = True,
    ) -> str:
        shown = [_add_thought_keys(form.build_message(message), message) for message in messages]
        options = {"add_generation_prompt": add_generation_prompt, **self.template_args}
        try:
            if form.has_null_content:
                return self._render_null_content(shown, list(tools) or None, options)
            if self._render_plainly and shown and not tools and all(map(_is_plain, shown)):
                return self._render_plainly(
                    messages=shown, add_generation_prompt=add_generation_prompt
                )
            return self.tokenizer.apply_chat_template(
                shown, tools=list(tools) or None, tokenize=False, **options
            )
        except Exception as error:
            # Whatever a template raises: jinja's errors, raise_exception, a missing key.
            roles = ", ".join(m.role for m in messages)
            hint = describe_odd_arguments(messages)
            raise TemplateError(
                f"the chat template refuses messages of roles {roles}: {error}{hint}"
            ) from error

    def _render_null_content(
        self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]
    ) -> str:
        """Render messages whose `content` may be null, which `apply_chat_template` leaves
        out of a message."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(None, tools)
        variables = {**self.tokenizer.special_tokens_map, **options}
        (text,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, **variables
        )
        return text

    def check_length(self, characters: int, max_tokens: int | None) -> None:
        """Raise `TextTooLongError` for a text longer than `max_tokens` tokens of maximal length.

        The check costs nothing and comes before `encode`.
        """
        if max_tokens is not None and characters > max_tokens * self.max_token_characters:
            raise TextTooLongError(characters, max_tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Special tokens in it are recognised, none is added."""
        backend = self._backend
        if backend is None or backend.truncation or backend.padding:
            # The tokenizer removes what an earlier call has left in its backend.
            return self.tokenizer.encode(text, add_special_tokens=False)
        return backend.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text that no template wrote (`encode_plain`)."""
        return encode_plain(self.tokenizer, text)

    def _encode_readonly(self, text: str) -> np.ndarray:
        token_ids = np.asarray(self.encode(text), np.int32)
        token_ids.flags.writeable = False
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=False)
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer without its stop token."""
        ids = list(token_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self._stop_texts else ids)

    def find_stop_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the stop token that ends an answer; "" if the answer was cut."""
        return self._stop_texts.get(token_ids[-1], "") if len(token_ids) else ""


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that no template wrote: as a tokenizer of transformers begins
    texts, once, and with nothing behind it, because it is continued."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(whole) - len(plain) + 1)
    beginning: list[int] = next(
        (whole[:at] for at in starts if whole[at : at + len(plain)] == plain), []
    )
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids if token_ids[: len(beginning)] == beginning else [*beginning, *token_ids]


def _compile_for_plain_messages(
    tokenizer: Any, template_args: Mapping[str, Any]
) -> Callable[..., str] | None:
    """Return the template as transformers compiles it, which renders plain messages without tools
    as `apply_chat_template` does, in a third of its time.

    None where that is the tokenizer's own, chooses among templates, or reads or converts one of
    `template_args`.
    """
    from transformers import PreTrainedTokenizerBase as Base
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if (
        compile_template is None
        or getattr(type(tokenizer), "apply_chat_template", None) is not Base.apply_chat_template
        or not isinstance(tokenizer.chat_template, str)
        or template_args.keys()
        & {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        or any(type(value) not in _UNCONVERTED_TYPES for value in template_args.values())
    ):
        return None
    return functools.partial(
        compile_template(tokenizer.chat_template).render,
        **{"tools": None, "documents": None, **tokenizer.special_tokens_map, **template_args},
    )


def _find_plain_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` of a tokenizer of transformers, which encodes and decodes
    in a quarter of its time; None if its class has methods of its own, or splits special tokens."""
    from transformers import PreTrainedTokenizerFast as Base

    own = ("encode", "_encode_plus", "decode", "_decode")
    if tokenizer.split_special_tokens or any(
        getattr(type(tokenizer), name, None) is not getattr(Base, name, None) for name in own
    ):
        return None
    return tokenizer.backend_tokenizer


def _is_plain(shown: Mapping[str, Any]) -> bool:
    """Return True for a message of a role and a text, in which transformers changes nothing."""
    return len(shown) == 2 and type(shown["role"]) is type(shown["content"]) is str


def _add_thought_keys(shown: dict[str, Any], message: Message) -> dict[str, Any]:
    """Return the message as templates take it, with its thought under each key that
    templates use for it."""
    return (
        shown | dict.fromkeys(REASONING_KEYS, message.reasoning_content)
        if message.reasoning_content
        else shown
    )


_UNCONVERTED_TYPES = (str, int, float, bool, type(None))
"""Types of values that transformers hands to templates as they are."""
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Template blocks of transformers that jinja does not know."""
_TRANSFORMERS_VARIABLES = ("messages", "raise_exception", "strftime_now")
"""Variables that transformers passes to a template, besides parameters of `apply_chat_template`
and special tokens."""


def find_template_variables(template: str) -> frozenset[str]:
    """Return the variables of a template that are not always set; none for a template that
    cannot be parsed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        names = jinja2.meta.find_undeclared_variables(
            environment.parse(_GENERATION_TAG.sub("", template))
        )
    except jinja2.TemplateSyntaxError:
        return frozenset()
    return frozenset(names - {*environment.globals, *_TRANSFORMERS_VARIABLES})
