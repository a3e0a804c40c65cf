"""Curves of characters: one line high (`draw_sparkline`), or a small chart of dots with a
scale (`draw_plot`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from rich.text import Text

from r3async.views.number_formats import format_number

SPARK_BARS = "▁▂▃▄▅▆▇█"
_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its dots."""


def thin_values(values: np.ndarray, width: int) -> np.ndarray:
    """Reduce values to at most `width` means of equal parts, in order. A part without a
    finite value is NaN."""
    finite = np.isfinite(values)
    if len(values) <= width:
        return np.where(finite, values, np.nan)
    edges = np.arange(width) * len(values) // width
    counts = np.add.reduceat(finite.astype(np.float64), edges)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def draw_sparkline(values: np.ndarray, width: int) -> str:
    """Draw the curve in `width` cells from the left, with its lowest value as the lowest bar.
    A gap is a space."""
    shown = thin_values(values, width)
    known = shown[np.isfinite(shown)]
    if not len(known):
        return " " * width
    low = float(known.min())
    high = float(known.max())
    # A constant is a flat line.
    scale = (
        (len(SPARK_BARS) - 1) / (high - low)
        if high - low > 1e-9 * max(abs(high), abs(low), 1e-30)
        else 0.0
    )
    calm = 0 if scale else 2
    cells = [
        " " if math.isnan(v) else SPARK_BARS[calm + round((v - low) * scale)]
        for v in shown.tolist()
    ]
    return "".join(cells).ljust(width)


def draw_bar(share: float, width: int) -> str:
    """Draw a share of 0 to 1 as a bar of `width` cells."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def draw_plot(
    curves: Sequence[tuple[np.ndarray, str]],
    width: int,
    height: int,
    *,
    log: bool = False,
    floor: float | None = None,
    threshold: float | None = None,
) -> list[Text]:
    """Draw `height` lines of `width` cells: curves (values, colour) with one scale, and a dashed
    line at `threshold`.

    Args:
        floor: A value that the scale includes.
        log: Use a scale of decades; values that are not positive are left out.
    """
    margin = 8
    columns = (width - margin) * 2
    rows = height * 4
    shown = []
    for values, color in curves:
        kept = np.where(values > 0, values, np.nan) if log else values
        shown.append((thin_values(kept, columns), color))
    finite = [values[np.isfinite(values)] for values, _ in shown]
    everything = np.concatenate([*finite, np.zeros(0)])
    if not len(everything) or columns < 4:
        return [
            Text(" " * margin + ("no data yet" if i == height // 2 else "")) for i in range(height)
        ]
    extra = [
        value for value in (floor, threshold) if value is not None and not (log and value <= 0)
    ]
    low, high = min(everything.min(), *extra, math.inf), max(everything.max(), *extra, -math.inf)
    if log:
        # A first step that is exactly on-policy has a drift of rounding errors, decades
        # below all others.
        low = max(math.log10(low), math.log10(np.median(everything)) - 2)
        high = math.log10(high)
    if high - low < 1e-12:
        low = low - 0.5 * (abs(low) or 1)
        high = high + 0.5 * (abs(high) or 1)
    dots = np.zeros((height, columns // 2), np.int32)
    colors = np.full((height, columns // 2), "", object)

    def level(value: float) -> int:
        share = ((math.log10(value) if log else value) - low) / (high - low)
        return rows - 1 - round(min(1.0, max(0.0, share)) * (rows - 1))

    def dot(x: int, y: int, color: str) -> None:
        dots[y // 4, x // 2] |= _BRAILLE_BITS[y % 4][x % 2]
        colors[y // 4, x // 2] = color

    def join(x: int, here: float, to_x: int, there: float, color: str) -> None:
        from_y = level(here)
        to_y = level(there)
        steps = max(to_x - x, abs(to_y - from_y), 1)
        for i in range(steps + 1):
            dot(
                x + round((to_x - x) * i / steps),
                from_y + round((to_y - from_y) * i / steps),
                color,
            )

    if threshold is not None and not (log and threshold <= 0):
        for x in range(0, columns, 3):
            dot(x, level(threshold), "red")
    for values, color in shown:
        stretch = (columns - 1) / max(len(values) - 1, 1)
        for index, here in enumerate(values):
            if math.isnan(here):
                continue
            there = values[index + 1] if index + 1 < len(values) else math.nan
            start = round(index * stretch)
            stop = round((index + 1) * stretch)
            join(
                start,
                here,
                start if math.isnan(there) else stop,
                here if math.isnan(there) else there,
                color,
            )
    ends = (10**high, 10**low) if log else (high, low)
    lines = []
    for row in range(height):
        label = (
            format_number(float(ends[0] if row == 0 else ends[1])) if row in (0, height - 1) else ""
        )
        text = Text(label[: margin - 1].rjust(margin - 1) + " ", style="dim")
        cells = "".join(chr(0x2800 + bits) if bits else " " for bits in dots[row].tolist())
        for color, run in groupby(
            zip(colors[row].tolist(), cells, strict=True), lambda cell: cell[0]
        ):
            text.append("".join(cell for _, cell in run), style=f"not dim {color}" if color else "")
        lines.append(text)
    return lines
