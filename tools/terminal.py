"""What commands have in common. Where they print: nothing that they were given by others reaches the terminal unescaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from r3async.world.processes import printable


class Terminal(Console):
    """Rich's, in which the text of what is printed is `printable`; its own colours and movements are not text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def echo(text: Any = "", **options: Any) -> None:
    """`typer.echo` of text that may come from others."""
    typer.echo(printable(str(text)), **options)


def safe(text: Text) -> Text:
    """For a display that is not a `Terminal`: as it is, if all of it is printable; else escaped, in one style."""
    plain = printable(text.plain)
    return text if plain == text.plain else Text(plain, text.style)
