"""What commands have in common. Where they print: nothing that they were given by others reaches the terminal unescaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from r3async.world.processes import escape_control_characters


class SafeConsole(Console):
    """Rich's, in which the text of what is printed is `escape_control_characters`; its own colours and movements are not text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_control_characters(segment.text))


def echo_printable(text: Any = "", **options: Any) -> None:
    """`typer.echo_printable` of text that may come from others."""
    typer.echo(escape_control_characters(str(text)), **options)


def escape_text(text: Text) -> Text:
    """For a display that is not a `SafeConsole`: as it is, if all of it is printable; else escaped, in one style."""
    plain = escape_control_characters(text.plain)
    return text if plain == text.plain else Text(plain, text.style)
