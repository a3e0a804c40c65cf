"""The pages are short plain sentences in the words of docs/concepts.md.

Words that the project has replaced are refused, with file and line, in prose, tables and headings. Code, links' targets and
HTML comments are left out: names of tests, messages and files are what they are. The length of sentences is that of prose only.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
"""Pages of decisions. Most are too short for a mean of their own."""
MEAN = 18
LONGEST = 40

OLD = {
    r"books?": "state, accounting, check",
    r"deaths?|dies|died|dying|dead": "lost, ended, killed, failure",
    r"gone": "lost, removed",
    r"rooms?": "capacity, free bytes; package",
    r"heard|said|told": "reported, logged, asked",
    r"sign|signs|signed": "checksum",
    r"steady": "compressible",
    r"chance": "rng, random",
    r"dog": "watchdog",
    r"anew|afresh": "again, new",
    r"begins? (again|anew)|begun again": "restarts",
    r"go on|goes on|went on|going on|gone on": "continues, resumes",
    r"stands? still|stood still": "is paused",
    r"gives? up|gave up|given up": "timed out, dropped",
    r"proven|proves": "verified, shows",
    r"can not": "cannot",
    r"(has|have) not got": "has no",
    r"befell|whoever|mended": "happened to, anyone who, corrected",
    r"pass(es)? (it )?by": "bypasses, skips",
    r"the house": "the code",
    r"parcels?|flying|knock(s|ed)?": "message, in flight, authenticate",
}
REFUSED = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in OLD.items()]

SKIPPED = re.compile(r"<!--.*?-->|^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def blanked(match: re.Match[str]) -> str:
    """Its line ends only, so that later lines keep their numbers."""
    return "\n" * match[0].count("\n")


def text_of(page: str) -> str:
    """A page without fenced blocks, comments and targets of links; code is one word."""
    return LINK.sub(r"\1", CODE.sub(lambda m: "X" + blanked(m), SKIPPED.sub(blanked, page)))


def old_words(page: str) -> list[str]:
    """`line: word (say: …)` of each old word."""
    found = []
    text = text_of(page)
    for pattern, instead in REFUSED:
        # A word of two may be broken over two lines.
        broken = re.compile(pattern.pattern.replace(" ", r"\s+"), re.IGNORECASE)
        for match in broken.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append((line, f"{line}: {' '.join(match[0].split())!r} (say: {instead})"))
    return [words for _, words in sorted(found)]


def sentences(page: str) -> list[str]:
    """Of paragraphs and bullets, not of tables and headings."""
    lines = [line for line in text_of(page).splitlines() if not line.startswith(("|", "#", "!"))]
    lines = [re.sub(r"^\s*([-*]|\d+\.)\s+", "\n", line) for line in lines]
    paragraphs = re.split(r"\n\s*\n", "\n".join(line if line.strip() else "\n" for line in lines))
    return [s for p in paragraphs for s in re.split(r"(?<=[.!?])[*\"”)]*\s+", " ".join(p.split())) if words(s) > 1]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'’\-./%×]+", sentence))


def mean(page: str) -> float:
    lengths = [words(sentence) for sentence in sentences(page)]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=lambda p: p.stem)
def test_no_page_uses_an_old_word(page):
    found = old_words(page.read_text())
    assert not found, "\n".join(f"{page.relative_to(ROOT)}:{words}" for words in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_sentences_are_short(page):
    text = page.read_text()
    assert mean(text) <= MEAN, f"{page.name}: {mean(text):.1f} words a sentence on average, {MEAN} are allowed"
    long = [s for s in sentences(text) if words(s) > LONGEST]
    assert not long, f"{page.name}: more than {LONGEST} words: {long}"


def test_sentences_of_decisions_are_short():
    text = "\n\n".join(page.read_text() for page in RECORDS)
    assert mean(text) <= MEAN, f"{mean(text):.1f} words a sentence on average, {MEAN} are allowed"
    long = [s for s in sentences(text) if words(s) > LONGEST]
    assert not long, f"more than {LONGEST} words: {long}"


def test_an_old_word_is_found_with_its_line_and_code_is_left_out():
    page = "# Page\n\nThe run `goes on`.\n\n```sh\necho anew\n```\n<!-- whoever -->\n| it goes\non | can not |\n"
    assert [found.split(" (")[0] for found in old_words(page)] == ["9: 'goes on'", "10: 'can not'"]
    assert "continues" in old_words(page)[0]


def test_long_sentences_are_found_and_tables_are_not_prose():
    short = "One two three. Four five `x y z`!\n\n* six seven\n* eight nine ten\n"
    assert [words(s) for s in sentences(short)] == [3, 3, 2, 3]
    table = "# A heading of many words\n\n| " + "word " * 50 + "|\n"
    assert mean(short + table) == mean(short)
    assert mean(short + "\n" + "word " * 90 + "end.\n") > MEAN
