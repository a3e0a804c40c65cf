"""What people get wrong on the command line of every command: one line that names it and the fix, and exit code 2."""

import sys

import pytest

from dev.__main__ import main as dev_main
from r3async.tools.__main__ import main as edge_main
from r3async.tools.cli import main
from tests.helpers.bad_inputs import judge
from tests.helpers.cli import Said, run_program, typed

COMMANDS = [
    ("trian quickstart", "Did you mean 'train'"),
    ("--verison", "No such option: --verison"),
    ("train", "a preset's name or a TOML file; `r3async train --list`"),
    ("train quickstart --list", "leave 'quickstart' out"),
    ("train quickstart --steps 10", "Settings have no dashes: steps=10"),
    ("train quickstart --steps=10", "Settings have no dashes: steps=10"),
    ("train quickstart --learner.lr 1e-4", "Settings have no dashes: learner.lr=1e-4"),
    ("train quickstart --lr 1e-4", "here it is `learner.lr`"),
    ("train quickstart --num-generations 8", "here it is `schedule.group_size`"),
    ("train quickstart --prompts-per-step 8", "it is `schedule.prompts_per_step` here"),
    ("train quickstart --nothing", "No such option: --nothing; for help: r3async train -h"),
    ("tail nowhere", "no run 'nowhere'"),
    ("tail empty", "empty is not the directory of a run"),
    ("tail file", "no run 'file'"),
    ("tail file --patience soon", "--patience"),
    ("tail file --address nobody", "nobody"),
    ("report nowhere", "no run 'nowhere'"),
    ("report nowhere empty", "no run 'nowhere'"),
    ("report empty", "empty is not the directory of a run"),
    ("inspect nowhere", "no run 'nowhere'"),
    ("inspect file", "file holds no message"),
    ("inspect routes nowhere", "no run 'nowhere'"),
    ("inspect verify empty", "empty is not the directory of a run"),
    ("inspect trajectories nowhere", "no run 'nowhere'"),
    ("inspect trajectories empty --step first", "--step"),
    ("inspect show empty --limit -1", "--limit"),
    ("inspect frames file", "file holds no message"),
    ("export nowhere out", "neither a checkpoint nor a run"),
    ("export empty out", "neither a checkpoint nor a run"),
    ("export file out", "file"),
    ("export empty empty", "empty exists"),
    ("export", "Missing argument"),
    ("diagnose nowhere", "RUN_OR_MODEL = 'nowhere'"),
    ("diagnose empty", "RUN_OR_MODEL = 'empty'"),
    ("diagnose models/no_weights generator.engine=scripted weights.probe=false", "needs vLLM"),
    ("diagnose models/no_weights", "no_weights"),
    ("diagnose models/no_weights --preset quikstart", "did you mean 'quickstart'"),
    ("eval nowhere", "RUN_OR_MODEL = 'nowhere'"),
    ("eval file", "RUN_OR_MODEL = 'file'"),
    ("eval empty", "RUN_OR_MODEL = 'empty'"),
    ("eval models/no_weights", "with --env NAME"),
    ("eval --policy clever", "must be model, oracle or random"),
    ("eval --policy oracle --tasks 0", "`--tasks` must be at least 1"),
    ("eval --policy oracle --seed -1", "`--seed` must be 0 or more"),
    ("eval --policy oracle --env revers-text", "did you mean 'reverse-text'"),
    ("eval --policy oracle --env mine:Gym", "has no oracle()"),
    ("eval --policy oracle --env raises:Env", "RuntimeError: no licence"),
    ("eval --policy oracle --preset quikstart", "did you mean 'quickstart'"),
    ("eval --policy oracle env.args.letter=3", "did you mean 'letters'"),
    ("train quickstart --capacity", "r3async train: No such option: --capacity: the plan has the speed of both sides"),
    ("train --published", "`training` and `generation`"),
    ("plan moe_30b_r3", "No such command 'plan': it is `r3async train PRESET --dry-run` now"),
    ("presets", "it is `r3async train --list` now"),
    ("cluster quickstart", "it is `r3async submit PRESET --dry-run` now"),
    ("keys my-keys", "it is `python -m r3async.tools keys` now"),
    ("init-model tiny", "it is `python -m r3async.tools init-model` now"),
    ("replay first --from 20", "it is `python -m r3async.tools replay` now"),
    ("sweep plan.toml", "No such command 'sweep': train with each seed"),
    ("submit quickstart --dry-run --address 127.0.0.1:1", "no Ray cluster answers"),
    ("submit quikstart", "did you mean 'quickstart'"),
    ("submit quickstart learner.lr=abc", "`learner.lr` = 'abc'"),
    ("submit quickstart --steps 3", "r3async submit: No such option: --steps. Settings have no dashes: steps=3"),
    ("submit quickstart --address http://127.0.0.1:1", "no Ray cluster answers"),
    ("submit status nowhere --address http://127.0.0.1:1", "no Ray cluster answers"),
    ("submit logs nowhere --token-file nowhere", "--token-file nowhere"),
    ("submit list --address http://127.0.0.1:1", "no Ray cluster answers at http://127.0.0.1:1"),
    ("doctor --everything", "No such option"),
    ("doctor --gpu --pack packed", "pip brings r3async"),
    ("sft", "Missing argument 'preset'"),
    ("sft quikstart", "did you mean 'quickstart'"),
    ("sft quickstart --steps 3", "Settings have no dashes: steps=3"),
    ("sft quickstart lr=3", "here it is `learner.lr`"),
    ("sft quickstart data=rows.jsonl", "`model.path` is empty"),
    ("sft quickstart model.path=nowhere", "is not a model directory"),
    ("sft quickstart model.path=models/no_template", "add chat_template.jinja"),
    ("train quickstart algorithm.distillation.teacher=nowhere", "is not a model directory"),
    ("report nowhere --serve", "no run 'nowhere'"),
    ("report empty --serve --port 99999", "--port"),
    ("eval nowhere --samples-per-task 4", "it is `evaluation.samples_per_task` here"),
]

EDGE_COMMANDS = [
    ("init-model empty", "empty exists already"),
    ("init-model file", "file exists already"),
    ("init-model /proc/nowhere/model", "/proc/nowhere"),
    ("init-model new model.init.layers=2", "it follows from `model.init.size`"),
    ("keys file", "file: cannot be written: Not a directory"),
    ("keys /proc/nowhere", "/proc/nowhere"),
    ("keys new --name ../x", "no name for a key"),
    ("replay nowhere", "no run 'nowhere'"),
]

DEV_COMMANDS = [
    ("simulate --seeds 0", "--seeds"),
    ("simulate --seed -1", "--seed"),
    ("simulate --case nowhere.json", "--case nowhere.json cannot be read"),
    ("simulate --case file", "--case file cannot be read"),
    ("bench pakcing", "Did you mean 'packing'"),
    ("bench start --cases warm", "'warm': there are model, none, help"),
    ("bench packing --seeds few", "--seeds 'few'"),
    ("bench conductor --generators few", "--generators 'few'"),
    ("bench conductor --only cloud --quick", "must be one of simulated, ray"),
    ("bench packing --model nowhere --quick", "--model nowhere"),
    ("bench e2e --cases z --quick", "there are a, b, c"),
    ("bench e2e --peer nobody --quick", "there are none, trl"),
    ("bench e2e --cases a --peer trl --quick", "PEER/bin/pip install trl"),
    ("bench weights weights.backend=pigeon", "'shared_memory'"),
    ("bench weights --updates 0", "--updates"),
    ("bench soak --minutes -1", "--minutes"),
    ("chaos quikstart", "did you mean 'quickstart'"),
    ("chaos --scenario earthquake", "must be one of"),
    ("chaos --engine steam", "scripted, vllm"),
    ("chaos --kills -1", "--kills"),
    ("pack-gpu packed --python 3", "a version such as 3.12"),
    ("pack-gpu packed --platform linux", "manylinux_2_28_x86_64"),
    ("pack-gpu packed --has nothing-such", "say which version"),
    ("sweep nowhere.toml", "nowhere.toml: No such file or directory"),
    ("sweep binary.toml", "binary.toml"),
]

SAMPLE = [
    "trian quickstart",
    "train quickstart lr=1e-4",
    "train quickstart --runs file",
    "train quickstart model.path=models/no_template",
    "train quickstart env.name=mine:Gym",
    "export file out",
]
"""Of each kind: a word that is none, a setting, a place for runs, a model, code of the user, and another command."""


@pytest.mark.parametrize(
    ("program", "line", "part"),
    [
        *((main, *row) for row in COMMANDS),
        *((edge_main, *row) for row in EDGE_COMMANDS),
        *((dev_main, *row) for row in DEV_COMMANDS),
    ],
    ids=[line for line, _ in COMMANDS + EDGE_COMMANDS + DEV_COMMANDS],
)
def test_a_command_line_that_cannot_be(program, line, part, folder):
    judge(typed(*line.split(), cwd=folder, main=program), (part,))
    assert not {"runs", "packed", "out", "new"} & {path.name for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("line", SAMPLE)
def test_a_real_process_says_the_same(line, folder):
    """The same words as in this process, and nothing from an interpreter that ends."""
    said = run_program([sys.executable, "-m", "r3async", *line.split()], cwd=folder)
    judge(said, (typed(*line.split(), cwd=folder).stderr.strip().splitlines()[-1],))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        *((("r3async", main), words) for words in ("-h", "train -h", "submit -h", "submit --help", "inspect -h")),
        *((("python -m r3async.tools", edge_main), words) for words in ("-h", "replay -h")),
        *((("python -m dev", dev_main), words) for words in ("-h", "bench -h", "bench packing -h", "simulate -h")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_help_is_everywhere(program, words, folder):
    said = typed(*words.split(), cwd=folder, main=program[1])
    assert (said.returncode, said.stderr) == (0, "")
    assert f"Usage: {program[0]}" in said.stdout


def test_benchmarks_are_listed(folder):
    assert typed("bench", cwd=folder, main=dev_main).stdout.startswith("e2e ")


def test_the_help_of_submit_shows_its_options_and_its_subcommands(folder):
    shown = typed("submit", "--help", cwd=folder).stdout
    for part in ("--address", "--follow", "--runs", "--dry-run", "status", "logs", "stop"):
        assert part in shown


def test_the_version_is_that_of_the_package(folder):
    from importlib.metadata import version

    assert typed("--version", cwd=folder) == Said(0, f"r3async {version('r3async')}\n", "")
