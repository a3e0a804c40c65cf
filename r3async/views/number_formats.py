"""Numbers as views print them."""

from __future__ import annotations


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number with three significant digits, in plain notation where readable:
    0.941, 1,234, 3.2e-05."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.2g}"


def format_percent(value: float | None) -> str:
    return "-" if value is None else "100 %" if value >= 1 else f"{min(100 * value, 99.9):.1f} %"


def format_metric(value: float | None, unit: str) -> str:
    """Format the value of a metric with its unit."""
    if value is None:
        return "-"
    if unit in ("fraction", "s"):
        return format_percent(value) if unit == "fraction" else format_seconds(value)
    return f"{format_number(value)} {unit}".rstrip()
