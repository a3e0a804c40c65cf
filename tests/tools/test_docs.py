"""What the pages say of the code is true of the code."""

import ast
import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import r3async
from dev.pages.commands import list_commands
from dev.pages.reference import (
    METRICS_PAGE,
    MODELS_PAGE,
    insert_metrics_table,
    main,
    read_field_docs,
    render_reference,
)
from r3async.config import Config, ConfigError, load_config
from r3async.data.metrics import METRICS, RENAMED_METRICS, find_metric
from r3async.data.models import ARCHITECTURES, TORCH_ONLY_ARCHITECTURES, UNSUPPORTED_MODEL_TYPES
from r3async.schedule.run_ahead import compute_staleness_bound
from r3async.tools.presets import list_preset_paths

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def test_every_generated_page_is_up_to_date():
    assert main(["--check"]) == 0, "run python -m dev.pages.reference"


def test_the_reference_has_every_key_and_its_text():
    text = render_reference()
    assert "## `[algorithm.rollout_kl]`" in text
    assert "| `estimator` | `k1`, `abs`, **`k2`**, `k3` | " in text
    assert "| `prometheus_port` | integer or **unset** | " in text
    assert '| `host` | string **`"127.0.0.1"`** | ' in text
    assert "The other keys are those of [`[env]`](#env)." in text
    assert "[`learner.lr`](#learner)" in text
    assert "| `lr` | float **`1e-06`** | Peak learning rate. |" in text
    assert (
        read_field_docs(Config)["name"]
        == "Run directory in `runs/`, a plain name without separators; default: preset and time."
    )


def test_the_methods_that_a_backend_must_have_are_those_of_the_page():
    tree = ast.parse((ROOT / "r3async" / "learner" / "backend.py").read_text())
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    open_methods = {
        m.name
        for m in methods
        if any(isinstance(line, ast.Raise) and "NotImplementedError" in ast.unparse(line) for line in m.body)
    }
    page = (ROOT / "docs" / "contributing.md").read_text()
    sentence = re.search(r"subclass of `r3async.learner.backend.LearnerBackend` with (.*?)\.\s", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence[1])) == {"from_pretrained", *open_methods}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pattern_of_metrics_matches_some(page):
    """`timing/weight_*_seconds` stands for the metrics that it matches. Such a pattern begins with a family of metrics."""
    families = {name.partition("/")[0] for name in METRICS if "/" in name}
    for pattern in re.findall(r"`(\w+/[\w/]*\*[\w/*]*)`", page.read_text()):
        assert pattern.partition("/")[0] not in families or fnmatch.filter(METRICS, pattern), pattern


def test_no_loss_is_given_the_range_of_another():
    """The reference says DAPO's 0.28 where a token's ratio is clipped, and not of an episode's, or of a weight."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    sections = dict(re.findall(r"^## `\[algorithm\.(\w+)\]`\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL))
    assert {name for name, text in sections.items() if "takes 0.28" in text} == {"ppo"}
    assert "The other keys are those of [`[algorithm.ppo]`]" in sections["tis"]


def test_the_table_of_metrics_is_made_from_the_catalogue():
    text = METRICS_PAGE.read_text()
    assert insert_metrics_table(text.replace("| `reward/mean` |", "| `reward/old` |")) == text
    named = [name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line)]
    assert {*METRICS} <= {*named}
    assert len(re.findall(r"`cpu/learner_model_seconds`", text)) == 1
    with pytest.raises(ValueError, match="has no place"):
        insert_metrics_table("# A page\n")


REPORTERS = {"info", "warning", "error", "report_event", "_report", "_report_event", "_report_info", "_report_warning"}
"""Functions whose first argument is the name of an event."""


def test_every_event_is_on_the_page_of_events():
    page = (ROOT / "docs" / "events.md").read_text()
    listed = {
        name for row in re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    words: set[str] = set()
    reported: set[str] = set()
    for path in (f for d in ("r3async", "actors", "tools") for f in (ROOT / d).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in REPORTERS and re.fullmatch(r"[a-z]+(_[a-z]+)*", str(node.args[0].value)):
                    reported.add(node.args[0].value)
    assert len(reported) > 60
    assert reported <= listed, f"docs/events.md lacks {sorted(reported - listed)}"
    assert listed <= words, f"no code has {sorted(listed - words)}"


def test_every_command_has_a_panel_and_an_example_that_it_takes():
    commands = list_commands()
    assert {described.panel for described in commands} == {"Train", "Look", "Cluster", "Develop", "Rarely needed"}
    for described in commands:
        assert described.example.startswith(f"{described.words} ") or described.example == described.words
        words = shlex.split(described.example.removeprefix(described.words))
        # It raises where the command does not take them. A command keeps the help options of its first context.
        described.command.make_context(described.words, words, help_option_names=["-h", "--help"])
    page = (ROOT / "docs" / "cli.md").read_text()
    assert "| `--no-follow`" not in page
    assert "| `--follow`, `--no-follow` | `--follow` | " in page
    assert "| `KEY=VALUE …` |" in page


def test_the_tables_of_models_have_every_declaration():
    text = MODELS_PAGE.read_text()
    for kind, declared in (ARCHITECTURES | TORCH_ONLY_ARCHITECTURES).items():
        assert f"| {declared.title} | {declared.example_models} | `{kind}` |" in text
    for kind, why in UNSUPPORTED_MODEL_TYPES.items():
        assert f"* `{kind}`: {why}" in text


def test_every_metric_that_code_or_a_page_names_is_in_the_catalogue():
    groups = {known.group for known in METRICS.values()} - {"step", "tokens", "data"}
    named = re.compile(rf"[`\"']((?:{'|'.join(groups)})/[a-z_0-9]+)[`\"']")
    files = [f for d in ("r3async", "actors", "tools") for f in (ROOT / d).rglob("*.py")]
    for path in [*files, *PAGES, *RECORDS]:
        old = RENAMED_METRICS if path == ROOT / "r3async/data/metrics.py" else {}  # the table of old names
        for name in {*named.findall(path.read_text())} - {*old}:
            assert find_metric(name).description != name, f"{path}: {name}"


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, *RECORDS]:
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page.name}: {target}"
            docs = ROOT / "docs"
            assert docs not in page.parents or docs in file.resolve().parents, f"{page.name}: the site lacks {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
                assert anchor in anchors, f"{page.name}: {target} (there are {sorted(anchors)})"


def list_site_pages(nav):
    """The pages of a navigation, whose entries are paths, or titles with a path or with entries of their own."""
    for entry in nav:
        for of in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [of] if isinstance(of, str) else list_site_pages(of)


def test_every_page_is_reached_from_the_navigation_of_the_site():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [*list_site_pages(nav)]
    assert sorted(pages) == sorted([*(page.name for page in PAGES[1:]), "decisions/README.md"])


def test_the_api_page_has_every_public_name_and_each_section_an_example():
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: r3async\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(r3async.__all__) - {"__version__"})
    sections = page.split("\n## ")[1:]
    assert all("```python\n" in section for section in sections if "\n::: " in section)


def sources():
    """All messages of the code, strings that are continued on the next line put together."""
    files = [f for d in ("r3async", "actors", "tools") for f in (ROOT / d).rglob("*.py")]
    return "\n".join(re.sub(r"""["']\s*\n\s*f?["']""", "", f.read_text()) for f in files)


def test_messages_of_the_faq_are_messages_of_the_code():
    code = sources()
    heads = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    assert len(heads) > 12
    for head in heads:
        assert head in code, head


def test_keys_that_the_pages_name_exist():
    dotted = re.compile(
        r"`((?:schedule|learner|generator|episode|routing|supervise|observe|transport)\.[a-z_.]+)(?:[ =`{])"
    )
    for name in ("concepts", "presets", "scaling", "faq"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        for key in dotted.findall(text):
            value = Config()
            for part in key.rstrip(".").split("."):
                assert hasattr(value, part), f"{name}: {key}"
                value = getattr(value, part)


def test_the_table_of_presets_is_that_of_the_files():
    text = (ROOT / "docs" / "presets.md").read_text()
    for name, bound in re.findall(r"^\| `(\w+)` \| .+ \| (\d+) \|$", text, re.MULTILINE):
        assert compute_staleness_bound(load_config(name).schedule) == int(bound), name
    said = set(re.findall(r"^\| `(\w+)` ", text, re.MULTILINE))
    assert said <= {p.stem for p in list_preset_paths()}


def test_every_file_of_the_sources_that_a_page_names_exists():
    """A path, from the top of the repository, the package or the tests; a bare `file.py` in a table of
    docs/architecture.md is in the folder of its row."""
    named = re.compile(r"`((?!runs/)(?:\w+/)+\w+\.(?:py|toml|sh))(?:::\w+)?`")
    for page in [*PAGES, *RECORDS]:
        for path in named.findall(page.read_text()):
            assert any((top / path).exists() for top in (ROOT, ROOT / "r3async", ROOT / "tests")), (
                f"{page.name}: {path}"
            )
    packages = (ROOT / "docs" / "architecture.md").read_text().split("\n## The packages\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \| (.+) \|$", packages, re.MULTILINE)
    assert len(rows) > 10
    for folder, text in rows:
        there = {p.name for top in (ROOT / "r3async", ROOT) for p in (top / folder).rglob("*.py")}
        for name in re.findall(r"`(\w+\.py)`", text):
            assert name in there, f"architecture.md: there is no {name} in {folder}/"


def test_the_words_of_other_trainers_are_those_that_errors_translate():
    """docs/coming-from.md: each word of a column, if somebody sets it here, leads to the setting of its row."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) > 20
    for ours, *theirs in rows:
        setting = ours.strip("`")
        for word in (re.match("`(.+?)`", cell)[1] for cell in theirs if cell):  # a note's number may follow
            if word == setting:
                continue
            with pytest.raises(ConfigError, match=f"`{re.escape(setting)}[=`]"):
                load_config("math", [f"{word}=1"])
