"""The templates of pages. Everything that is filled in is escaped."""

from __future__ import annotations

from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from r3async.data.metrics import find_metric
from r3async.views.number_formats import format_number

TEMPLATE_DIRECTORY = Path(__file__).parent


def _make_jinja_environment() -> Environment:
    """Create the environment of the templates. JSON goes inside a script element, with null for
    non-finite numbers."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATE_DIRECTORY),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_function"] = lambda value, **_: msgspec.json.encode(value).decode()
    found.filters |= {"number": format_number, "docs": lambda name: find_metric(name).description}
    found.globals["beside"] = lambda name: Markup((TEMPLATE_DIRECTORY / name).read_text("utf-8"))
    return found


TEMPLATES = _make_jinja_environment()
