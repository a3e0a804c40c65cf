"""An agent that answers questions of two hops with a search tool over a local index (SQLite's FTS5).

Who works where, and when a company was founded, are in different documents, so that a question takes two searches.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sqlite3

from r3async import Action, Message, StepResult
from r3async.envs.tool_call_parser import run_tool_calls

FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
LAST = ("Moss", "Reed", "Park", "Lane", "Wood")
COMPANIES = ("Acme", "Borel", "Cobalt", "Delta", "Ember", "Fjord", "Gamma", "Helix")
SEARCH_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents; returns the best three.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


def make_facts() -> tuple[dict[str, str], dict[str, int]]:
    """Return where each person works, and the year in which each company was founded. Always the same."""
    rng = random.Random(0)
    people = {f"{first} {last}": rng.choice(COMPANIES) for first in FIRST for last in LAST}
    return people, {company: rng.randint(1900, 1999) for company in COMPANIES}


PEOPLE, YEARS = make_facts()


@functools.cache
def open_index() -> sqlite3.Connection:
    """Build the index in memory, once a process."""
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
    texts = [f"{person} works at {company}." for person, company in PEOPLE.items()]
    texts += [f"{company} was founded in {year}." for company, year in YEARS.items()]
    index.executemany("INSERT INTO documents VALUES (?)", [(text,) for text in texts])
    return index


def search_documents(query: str, count: int = 3) -> str:
    """Return the best documents, one a line. Any text is a query: its words, each of which may be missing."""
    words = re.findall(r"\w+", query)[:16]
    if not words:
        return "nothing found"
    match = " OR ".join(f'"{word}"' for word in words)
    rows = open_index().execute(
        "SELECT text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?", (match, count)
    )
    return "\n".join(text for (text,) in rows) or "nothing found"


class SearchFacts:
    """One question an episode. The first answer without a tool call ends it, and earns 1 if it has the year."""

    size = len(PEOPLE)
    tools = (SEARCH_TOOL,)

    def __init__(self, searches: int = 4):
        self.searches = searches
        self.person, self.used = "", 0

    async def reset(self, task_seed: int) -> list[Message]:
        self.person, self.used = sorted(PEOPLE)[task_seed % self.size], 0
        return [Message("user", f"When was the company founded that {self.person} works at?")]

    async def step(self, action: Action) -> StepResult:
        left = self.searches - self.used
        results = await run_tool_calls(
            action.text,
            self.tools if left else (),
            self._call,
            seconds=5,
            max_calls=left,
            thinking=action.thinking,
        )
        self.used += len(results)
        if results:
            return StepResult(0.0, results)
        right = str(YEARS[PEOPLE[self.person]]) in re.findall(r"\d+", action.text)
        return StepResult(float(right), done=True, metrics={"searches": self.used})

    async def _call(self, name: str, arguments: dict) -> str:
        if name != "search" or not isinstance(arguments.get("query"), str):
            raise ValueError("the only tool is search, with a query")
        return search_documents(arguments["query"])

    def oracle(self) -> str:
        """Search for the person, then for the company, then answer."""
        company = PEOPLE[self.person]
        if self.used < 2:
            query = (self.person, company)[self.used]
            return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query}})}</tool_call>"
        return str(YEARS[company])
