"""Safe output for commands: text from elsewhere never reaches the terminal unescaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from r3async.world.process_output import escape_control_characters


class SafeConsole(Console):
    """A rich console that escapes control characters in text; its own colours and cursor
    movements are not text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=escape_control_characters(segment.text))
            )


def echo_printable(text: Any = "", **options: Any) -> None:
    """Print text that may come from others, with control characters escaped."""
    typer.echo(escape_control_characters(str(text)), **options)
