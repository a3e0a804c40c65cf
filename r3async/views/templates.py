"""The templates of pages. Everything that is filled in is escaped."""

from __future__ import annotations

import base64
import functools
import gzip
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from r3async.record.metrics import find_metric
from r3async.views.summary import format_number

TEMPLATE_DIRECTORY = Path(__file__).parent


def load_plotly_script() -> str:
    """Return the script that draws charts, 4.8 MB."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@functools.cache
def pack_plotly_script() -> str:
    """Return the same, compressed by gzip, in base64: 2 MB."""
    return base64.b64encode(gzip.compress(load_plotly_script().encode(), mtime=0)).decode()


def _make_jinja_environment() -> Environment:
    """Create the environment of the templates. JSON goes inside a script element, with null for non-finite numbers."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATE_DIRECTORY),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_function"] = lambda value, **_: msgspec.json.encode(value).decode()
    found.filters |= {"number": format_number, "docs": lambda name: find_metric(name).description}
    found.globals |= {
        "packed_plotly": lambda: Markup(pack_plotly_script()),
        "beside": lambda name: Markup((TEMPLATE_DIRECTORY / name).read_text("utf-8")),
    }
    return found


TEMPLATES = _make_jinja_environment()
