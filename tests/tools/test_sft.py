"""`r3async sft`: a run that learns, stops, resumes, and says what is wrong."""

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from r3async.checkpoint import CheckpointDirectory, CheckpointError
from r3async.config import ConfigError, load_config
from r3async.data.metrics import METRICS
from r3async.record.reading import read_json_objects
from r3async.tools.cli import app
from r3async.tools.init_model import init_model
from r3async.tools.sft import run_sft
from r3async.tools.sft_data import SupervisedRows
from r3async.tools.tail.live import describe_step
from r3async.views.report import write_report
from r3async.views.summary import summarize_run
from tests.helpers import checkpoint as hc
from tests.helpers.cli import run_program

STEP_TIMEOUT = 120.0
WORDS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "model"
    tiny = ["model.init.size=tiny", "model.init.warm_reward=0", "env.args.turns=2"]
    init_model(path, load_config("quickstart", tiny))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    made = [{"prompt": f"{n} {word}", "completion": word[::-1]} for n in range(5) for word in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def config(model, rows, *changes):
    fixed = ["learner.lr=3e-3", "learner.warmup_steps=0", "sft.rows_per_step=8", "checkpoint.asynchronous=false"]
    return load_config("quickstart", [f"model.path={model}", f"data={rows}", *fixed, *changes], "sft")


def run(model, rows, root, *changes):
    return run_sft(config(model, rows, *changes), "quickstart", Console(file=io.StringIO()), root)


@pytest.mark.parametrize(("lora", "fell"), [([], 0.5), (["learner.lora.rank=4", "learner.lr=2e-2"], 0.2)])
def test_a_run_learns_and_its_files_are_those_of_a_run(model, rows, tmp_path, lora, fell):
    done = run(model, rows, tmp_path, "steps=12", "data.eval=6", "evaluation.every_steps=4", "name=a", *lora)
    table = read_json_objects(done / "metrics.jsonl")
    assert [row["step"] for row in table] == list(range(1, 13))
    assert table[-1]["loss/answers"] < table[0]["loss/answers"] - fell
    assert {name for row in table for name in row} <= set(METRICS)
    assert [row["step"] for row in table if "loss/answers_held_out" in row] == [4, 8, 12]
    assert describe_step(table[3]).startswith("loss ")
    assert "held out" in describe_step(table[3])
    summary = summarize_run(done)
    assert summary.status == "finished"
    assert "answers" in write_report(done).read_text()
    start, trained = load_file(model / "model.safetensors"), load_file(done / "model" / "model.safetensors")
    assert start.keys() == trained.keys()
    assert AutoModelForCausalLM.from_pretrained(done / "model").config.num_experts == 8


def test_epochs_say_how_many_steps_and_each_row_is_trained_as_often(model, rows, tmp_path):
    done = run(model, rows, tmp_path, "sft.epochs=2", "name=a")
    table = read_json_objects(done / "metrics.jsonl")
    assert len(table) == 8  # 30 rows twice, 8 a step
    assert table[-1]["data/epochs"] == pytest.approx(64 / 30)
    # Two epochs and the first four rows of the third.
    answers = {word: 5 * (len(word) + 1) for word in WORDS}
    trained = sum(row["batch/trained_tokens"] for row in table)
    assert 0 < trained - 2 * sum(answers.values()) <= 4 * (max(map(len, WORDS)) + 1)


def test_a_run_in_two_parts_is_bit_by_bit_one(model, rows, tmp_path):
    straight = run(model, rows, tmp_path, "steps=6", "name=straight")
    run(model, rows, tmp_path, "steps=3", "name=parts")
    parts = run(model, rows, tmp_path, "steps=6", "name=parts")
    newest = [hc.paths(CheckpointDirectory(done / "checkpoints").step_path(6)) for done in (straight, parts)]
    hc.assert_same(*newest)
    timed = ("time", "_seconds", "_per_second", "lineage")
    tables = [
        [{k: v for k, v in row.items() if not k.endswith(timed)} for row in read_json_objects(done / "metrics.jsonl")]
        for done in (straight, parts)
    ]
    assert tables[0] == tables[1]


@pytest.mark.long
def test_ctrl_c_ends_the_step_saves_and_resumes(model, rows, tmp_path):
    words = command(model, rows, tmp_path, "steps=100000")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("   2/100000"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.communicate(timeout=STEP_TIMEOUT)[1]
    finally:
        process.kill()
    assert process.returncode == 0, "".join(seen) + rest
    assert "to resume: the same command with name=a" in rest
    made = len(read_json_objects(tmp_path / "a" / "metrics.jsonl"))
    assert (tmp_path / "a" / "model" / "model.safetensors").exists()
    assert summarize_run(tmp_path / "a").status == "stopped"
    again = run_program(command(model, rows, tmp_path, f"steps={made + 1}"), cwd=tmp_path, timeout=STEP_TIMEOUT)
    assert again.returncode == 0, again.stderr
    assert f"resumes from step {made}" in again.stderr
    assert len(read_json_objects(tmp_path / "a" / "metrics.jsonl")) == made + 1


def command(model, rows, root, *changes):
    words = [sys.executable, "-m", "r3async.tools.cli", "sft", "quickstart", f"model.path={model}", f"data={rows}"]
    return [*words, "name=a", "learner.warmup_steps=0", *changes, "--runs", str(root)]


def test_rows_that_are_too_long_are_dropped_and_counted(model, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    long = {"prompt": "x" * 500, "answer": "y"}
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"prompt": "a", "answer": "b"}] * 9 + [long]))
    run_sft(config(model, path, "steps=1", "name=a"), "quickstart", Console(stderr=True), tmp_path)
    told = " ".join(capsys.readouterr().err.split())
    assert "data: 9 rows are trained, 1 dropped (1 longer than episode.max_total_tokens = 128); 18 tokens of" in told
    path.write_text(json.dumps(long) + "\n")
    with pytest.raises(ConfigError, match=r"all 1 rows are longer than `episode.max_total_tokens` = 128; the shortest"):
        run(model, path, tmp_path, "steps=1", "name=b")


def with_template(model, path, template):
    shutil.copytree(model, path)
    (path / "chat_template.jinja").write_text(template)
    return path


OPENS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</t>')[-1] }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><t>{% endif %}"
)


def test_answers_that_the_template_writes_without_what_a_prompt_opens_are_counted(model, rows, tmp_path):
    told = []
    SupervisedRows.from_config(config(with_template(model, tmp_path / "model", OPENS), rows), told.append)
    assert told[0].startswith("data: 30 rows are trained, 0 dropped")
    assert told[1].startswith(
        "data: the prompt of an episode ends with '<t>', which the chat template does not write before"
    )
    assert f"the answers of 30 rows, such as {rows}, line 1" in told[1]
    SupervisedRows.from_config(config(model, rows), told.append)
    assert len(told) == 3


def test_an_answer_that_the_template_cuts_is_refused_by_its_line(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "completion": c}) + "\n" for c in ("b", "<t>why</t>b")))
    with pytest.raises(
        ConfigError, match=r"rows.jsonl, line 2: the chat template leaves this out of the answer.*'<t>why"
    ):
        SupervisedRows.from_config(config(with_template(model, tmp_path / "model", OPENS), path), print)


def test_what_cannot_be_taught_is_refused(model, rows, tmp_path):
    with pytest.raises(ConfigError, match="no model that could learn"):
        run(model, rows, tmp_path, "name=a", "learner.backend=scripted")
    with pytest.raises(ConfigError, match="`data` names no rows to learn"):
        run_sft(load_config("quickstart", [f"model.path={model}"]), "quickstart", Console(), tmp_path)
    done = CliRunner().invoke(app, ["sft", "--help"])
    assert "messages, or prompts and answers" in " ".join(done.output.split())


def test_other_rows_and_other_settings_are_refused_at_a_resume(model, rows, tmp_path):
    run(model, rows, tmp_path, "steps=1", "name=a")
    with pytest.raises(CheckpointError, match=r"sft.rows_per_step.*was 8 and is 4"):
        run(model, rows, tmp_path, "steps=2", "name=a", "sft.rows_per_step=4")
    other = tmp_path / "rows.jsonl"
    other.write_text(Path(rows).read_text() + json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    with pytest.raises(CheckpointError, match=r"env.args.path|the rows of `data`"):
        run(model, other, tmp_path, "steps=2", "name=a")
