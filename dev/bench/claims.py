"""The command `python -m dev.bench.claims`: check the figures about learning in README.md and docs/ against their data.

`docs/figures/claims.toml` lists the claims. A claim with `data` holds words of its page with places for figures
(`str.format`), which are filled from that file of docs/figures/: words and data are compared, and `dev.bench.page`
writes the figures. A claim without data names in `runs` the number of runs behind it, and its page must say so in the
same section. A block of a page that looks like such figures but is in no claim is reported; `[[other]]` lists blocks
that are not figures about learning, with the reason. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES_DIRECTORY = DOCS / "figures"
REGISTER_PATH = FIGURES_DIRECTORY / "claims.toml"
UNCHECKED_PAGES = ("configuration", "comparison")
"""Stems of pages that are made from something else; they are not checked, and neither are the records of docs/decisions/."""

LEARNING = re.compile(
    r"\b(rewards?|drift|drifts|agreement|KL|k3|pass@\w+|learn(s|ed|ing)? (less|more|better|faster))\b", re.IGNORECASE
)
MEASURED = re.compile(r"\d\.\d+ (→|±)|→ \d\.\d|\b0\.\d{2,}\b|\b\d\.\d+ times\b|\b\d\.\d+e-\d+|\b\d+(\.\d+)? %")
TABLE = r"(<!-- (bench|science): ([\w-]+)(?:: ([^>\n]+))? -->\n)(.*?)(<!-- end of \3 -->)"
"""The place of a table that is made from data; `bench/page.py` fills it."""
GENERATED = re.compile(rf"{TABLE}|<!-- metrics.*?end of metrics -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FIGURE_PLACE = re.compile(r"\{[^{}]*\}")
FIGURE_PATTERN = r"(?:never|[-+−]?[\d.,]+(?:e[+-]?\d+)?)"


class FigureClaim(msgspec.Struct, forbid_unknown_fields=True):
    """Figures about learning on a page, and where they come from.

    Attributes:
        page: path of the page from the top of the repository.
        words: words of the page, on one line; for a table its first words, which stand for the whole table.
        data: a file in docs/figures.
        runs: the runs behind the figures, in the page's words, if there is no data.
        how: the command that makes the data.
    """

    page: str
    words: str
    data: str = ""
    runs: str = ""
    how: str = ""


class OtherFigures(msgspec.Struct, forbid_unknown_fields=True):
    """Words of a block that looks like figures about learning, and `why` it is not."""

    page: str
    words: str
    why: str


class ClaimRegister(msgspec.Struct, forbid_unknown_fields=True):
    claim: list[FigureClaim]
    other: list[OtherFigures] = []


def read_register(path: Path = REGISTER_PATH) -> ClaimRegister:
    return msgspec.toml.decode(path.read_bytes(), type=ClaimRegister)


def read_pages() -> dict[str, str]:
    """Return the pages' texts, by path from the top of the repository."""
    paths = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    return {str(path.relative_to(DOCS.parent)): path.read_text() for path in paths if path.stem not in UNCHECKED_PAGES}


# -- data --------------------------------------------------------------------------------------------------------------


def _read_sweep(path: Path) -> dict[str, Any]:
    """Return a sweep's points and runs by name; points have `estimates` and `differences`, runs have `figures`, by
    outcome."""
    results = json.loads(path.read_text())
    by_name = {of: {each["name"]: each for each in results[of]} for of in ("points", "runs")}
    return {"facts": results["facts"], **by_name}


def read_data(name: str) -> Any:
    """Return the data that fills the places of a claim; the rows of a report are by case. Raises `OSError`."""
    path = FIGURES_DIRECTORY / name
    if path.parent.name == "science":
        return _read_sweep(path)
    data = json.loads(path.read_text().strip().rpartition("\n")[2])
    if path.parent.name == "bench":
        data["rows"] = {row["case"]: row["figures"] for row in data["rows"]}
    return data


def fill_words(claim: FigureClaim, data: Any) -> str:
    """Return the claim's words, filled with the figures of `data`. Raises `ValueError` that names the place."""
    try:
        return FIGURE_PLACE.sub(lambda place: format_place(place[0], data), claim.words)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{claim.data} lacks {error} for {claim.words!r}") from error


def format_place(place: str, data: Any) -> str:
    """Return the figure of a place in the format of the pages: 1.2e-4, not 1.2e-04; what did not happen is `never`."""
    text = re.sub(r"(?<=e)([+-])0+(?=\d)", r"\1", place.format_map(data))
    return text.replace("e+0", "").replace("None", "never")


# -- pages -------------------------------------------------------------------------------------------------------------


def join_words(text: str) -> str:
    return " ".join(text.replace("**", "").split())


def iter_blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield each paragraph, bullet and table with the heading above it, without the parts that other tools generate."""
    heading = ""
    for block in re.split(r"\n\s*\n|\n(?=\* )", FENCED.sub("\n\n", GENERATED.sub("\n\n", page))):
        if heading_match := re.match(r"#+ (.+)", block.strip()):
            heading = heading_match[1]
            block = block.strip().partition("\n")[2]
        if block.strip():
            yield heading, join_words(block)


def is_figure(block: str) -> bool:
    """Return True if the block looks like figures about learning."""
    return bool(LEARNING.search(block) and MEASURED.search(re.sub(r"`[^`]*`", "", block)))


def fill_claims(name: str, page: str, register: ClaimRegister) -> str:
    """Return the page with the figures of its claims replaced by those of the data."""
    for claim in register.claim:
        if claim.page != name or not claim.data or not FIGURE_PLACE.search(claim.words):
            continue
        parts = [re.escape(part).replace(r"\ ", r"\s+") for part in FIGURE_PLACE.split(claim.words)]
        pattern = f"(?:{FIGURE_PATTERN})".join(f"({part})" for part in parts)
        places, data = [*FIGURE_PLACE.findall(claim.words), ""], read_data(claim.data)
        if match := re.search(pattern, page):
            text = "".join(part + format_place(place, data) for part, place in zip(match.groups(), places, strict=True))
            page = page[: match.start()] + text + page[match.end() :]
    return page


def find_problems(register: ClaimRegister, texts: Mapping[str, str]) -> list[str]:
    """Return all problems, one line each.

    Problems are claims that are not on their page, that differ from their data or that do not name their runs, and
    figures that are in no claim.
    """
    problems = []
    for claim in register.claim:
        page = join_words(texts.get(claim.page, ""))
        try:
            words = join_words(fill_words(claim, read_data(claim.data)) if claim.data else claim.words)
        except (OSError, ValueError) as error:
            problems.append(f"{claim.page}: {error}")
            continue
        if words not in page:
            problems.append(f"{claim.page} does not say {words!r}" + f", as {claim.data} does" * bool(claim.data))
        elif not claim.data and not (claim.runs and claim.runs in _find_section(texts[claim.page], words)):
            problems.append(
                f"{claim.page}: its section does not say of how many runs {words!r} is: {claim.runs or '?'}"
            )
    for name, text in texts.items():
        for heading, block in iter_blocks(text):
            if is_figure(block) and not _is_registered(name, block, register):
                problems.append(f"{name}, {heading}: in no claim of {REGISTER_PATH.name}: {block[:160]}")
    stale = (
        f"{each.page} does not say {each.words!r} (any more)" for each in register.other if not _is_on_page(each, texts)
    )
    return [*problems, *stale]


def _is_on_page(other: OtherFigures, texts: Mapping[str, str]) -> bool:
    return other.words in join_words(texts.get(other.page, ""))


def _is_registered(name: str, block: str, register: ClaimRegister) -> bool:
    named = [(each.page, each.words) for each in register.claim] + [(each.page, each.words) for each in register.other]
    starts = [join_words(FIGURE_PLACE.split(words)[0]) for page, words in named if page == name]
    return any(start and start in block for start in starts)


def _find_section(page: str, words: str) -> str:
    """Return the whole section of the page that contains the words."""
    parts = re.split(r"^(?=#+ )", page, flags=re.MULTILINE)
    return next((join_words(part) for part in parts if words in join_words(part)), "")


def main() -> int:
    """List the claims without data, and report what is wrong."""
    register = read_register()
    without = [claim for claim in register.claim if not claim.data]
    print(f"{len(register.claim) - len(without)} claims of data, and {len(without)} without, which say so:")
    for claim in without:
        print(f"{claim.page}: {join_words(claim.words)[:90]} ({claim.runs}; {claim.how})")
    wrong = find_problems(register, read_pages())
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
