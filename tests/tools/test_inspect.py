"""`r3async inspect`: what a person sees of a run's routes, and the message when there is nothing to see."""

import io
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from r3async.config import config_from_dict, config_to_toml
from r3async.record.routes import RouteFile
from r3async.tools.init_model import build_byte_tokenizer
from r3async.tools.inspect.routes import label_token_roles
from tests.helpers.routes import ID, LAYERS, call, damage_last_record, episode
from tests.helpers.written_runs import write_routes

END = 257
QUIET = {"routing": {"trace": "all"}}


def write_run(root: Path, name: str = "demo", *, change=None, config=QUIET) -> Path:
    """A run with routes, and no other records."""
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(config_from_dict(config)))
    build_byte_tokenizer().save_pretrained(run / "init")
    write_routes(run, change)
    return run


LAST = "g00000040e0000"


def flipped(trained, calls):
    used = trained.used.copy()
    used[4, 1] = trained.own[4, 1] if set(trained.own[4, 1]) != set(used[4, 1]) else (used[4, 1] + 1) % 8
    return msgspec.structs.replace(trained, used=used), calls


# --- verification


def test_equal_routes_are_verified(tmp_path, inspect) -> None:
    write_run(tmp_path)
    text = inspect("verify", "demo")
    assert "2 samples of 2 steps (1 to 11)" in text
    assert f"equal       {2 * 9 * LAYERS:>12}" in text
    assert "every recorded route was used" in text
    found = json.loads(inspect("verify", "demo", "--json"))
    assert (found["equal"], found["different"], found["verified"]) == (2 * 9 * LAYERS, 0, True)


def test_one_difference_is_named_and_exits_1(tmp_path, inspect) -> None:
    write_run(tmp_path, change=flipped)
    text = inspect("verify", "demo", code=1)
    assert f"step 11, sample {LAST}s0, position 4, MoE layer 1: the engine chose" in text
    assert "every recorded" not in text


def test_a_sample_the_engine_never_sampled_exits_1(tmp_path, inspect) -> None:
    write_run(tmp_path, change=lambda trained, calls: (trained, calls[:1]))
    text = inspect("verify", "demo", code=1)
    assert f"1 samples are not in the engine's record as they were trained; the first is {LAST}s0" in text


def test_nothing_compared_verifies_nothing(tmp_path, inspect) -> None:
    def unrecorded(trained, calls):
        calls = [msgspec.structs.replace(c, rows=np.zeros((0, 0, 0), np.uint8)) for c in calls]
        return msgspec.structs.replace(trained, used=trained.own), calls

    run = write_run(tmp_path, change=unrecorded)
    for name in ("learner", "engine-generator-0"):  # only step 11
        (run / "routes" / f"{name}.0.routes").unlink()
    trained, calls = unrecorded(*episode())
    RouteFile(run / "routes", "learner").append(trained)
    for each in calls:
        RouteFile(run / "routes", "engine-generator-0").append(each)
    text = inspect("verify", "demo", code=1)
    assert "nothing could be compared" in text


def test_a_torn_file_is_reported_beside_what_could_be_compared(tmp_path, inspect) -> None:
    run = write_run(tmp_path)
    with (run / "routes" / "learner.0.routes").open("ab") as file:
        file.write(b"r3rou")
    text = inspect("verify", "demo")
    assert "on there is no record: 5 bytes, less than the head of a record" in text
    assert "every recorded route was used" in text
    assert "less than the head" in inspect("demo")


def test_a_damaged_record_is_one_line(tmp_path, inspect) -> None:
    run = write_run(tmp_path)
    damage_last_record(run / "routes" / "learner.0.routes")
    for command in ("verify", "routes"):
        text = inspect(command, "demo", code=2)
        assert "is damaged" in text
        assert "Traceback" not in text


@pytest.mark.parametrize("replay", ["off", "learner"])
def test_routes_that_were_not_to_be_the_engines_are_not_verified(tmp_path, inspect, replay) -> None:
    write_run(tmp_path, config={"routing": {"trace": "all", "replay": replay}})
    text = inspect("verify", "demo", code=2)
    assert f'routing.replay="{replay}"' in text
    inspect("routes", "demo")


# --- token by token


def test_routes_are_shown_token_by_token(tmp_path, inspect) -> None:
    write_run(tmp_path)
    text = inspect("routes", "demo")
    lines = text.splitlines()
    trained, calls = episode()
    rows = np.concatenate([c.rows for c in calls])
    agree = (np.sort(rows) == np.sort(trained.own[:9])).all(axis=-1)
    assert lines[0] == f"sample {LAST}s0 of step 11"
    assert "10 tokens, 5 sampled; 3 MoE layers, 2 experts a token" in text
    assert f"recorded 9 of 10 positions (90.0 %); agreement {100 * agree.mean():.1f} %" in text
    assert f"0: {100 * agree[:, 0].mean():.0f}  1: {100 * agree[:, 1].mean():.0f}" in text
    table = lines[lines.index(next(line for line in lines if line.lstrip().startswith("pos"))) + 1 :]
    assert [int(line[:5]) for line in table] == list(range(10))
    assert [line.split()[2] for line in table] == ["prompt"] * 3 + ["sampled"] * 3 + ["observation"] * 2 + [
        "sampled"
    ] * 2
    assert [line.split()[3] for line in table] == ["-"] * 3 + ["0"] * 3 + ["-"] * 2 + ["0"] * 2
    for at, line in enumerate(table[:9]):
        for layer in range(LAYERS):
            engine, own = sorted(rows[at, layer].tolist()), sorted(trained.own[at, layer].tolist())
            assert f"{engine[0]} {engine[1]}" in line
            left, joined = sorted(set(engine) - set(own)), sorted(set(own) - set(engine))
            assert not left or f"{','.join(map(str, left))}>{','.join(map(str, joined))}" in line
    own = sorted(trained.own[9, 0].tolist())
    assert f"[{own[0]} {own[1]}]" in table[9]
    assert all(cell_len(line) <= 80 for line in table)
    assert "\x1b" not in text


def test_only_what_disagrees_and_only_one_layer(tmp_path, inspect) -> None:
    write_run(tmp_path)
    trained, calls = episode()
    rows = np.concatenate([c.rows for c in calls])
    differs = np.flatnonzero((np.sort(rows[:, 1]) != np.sort(trained.own[:9, 1])).any(axis=-1))
    text = inspect("routes", "demo", "--layer", "1", "--diff")
    table = text[text.index("  pos") :].splitlines()
    assert "layer 1" in table[0]
    assert "layer 0" not in table[0]
    assert [int(line[:5]) for line in table[1:]] == differs.tolist()
    assert 0 < len(differs) < 10

    def agreeing(trained, calls):
        return msgspec.structs.replace(trained, own=trained.used), calls

    write_run(tmp_path, "same", change=agreeing)
    assert "no token to show" in inspect("routes", "same", "--diff")


def test_help_says_what_each_subcommand_does(inspect) -> None:
    text = inspect("--help")
    for command in ("trajectories", "routes", "verify", "frames"):
        assert re.search(rf"{command} +[A-Z]", text)
        assert "--json" in inspect(command, "--help")


def test_one_json_object_per_token(tmp_path, inspect) -> None:
    write_run(tmp_path)
    text = inspect("routes", "demo", "--step", "1", "--json")
    tokens = [json.loads(line) for line in text.splitlines()]
    trained, calls = episode()
    assert [t["token"] for t in tokens] == trained.token_ids.tolist()
    assert [t["position"] for t in tokens] == list(range(10))
    assert {(t["step"], t["sample"]) for t in tokens} == {(1, f"{ID}s0")}
    assert tokens[5]["layers"][2]["engine"] == calls[1].rows[0, 2].tolist()
    assert tokens[5]["layers"][2]["own"] == trained.own[5, 2].tolist()
    assert tokens[5]["layers"][2]["used"] == trained.used[5, 2].tolist()
    assert tokens[9]["layers"][0]["engine"] is None
    assert tokens[9]["layers"][0]["agree"] is None
    assert [t["version"] for t in tokens[:4]] == [None, None, None, 0]
    byte = build_byte_tokenizer()
    assert tokens[3]["text"] == byte.decode([10])


def test_many_layers_in_few_columns_are_counted_not_listed(tmp_path, inspect) -> None:
    def deep(trained, calls):
        def wider(rows):
            return np.tile(rows, (1, 16, 1))

        trained = msgspec.structs.replace(trained, own=wider(trained.own), used=wider(trained.used))
        return trained, [msgspec.structs.replace(c, rows=wider(c.rows)) for c in calls]

    write_run(tmp_path, change=deep)
    text = inspect("routes", "demo")
    table = text[text.index("  pos") :].splitlines()
    assert "too many layers for this width; --layer L" in text
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    assert all("of 48" in line for line in table[1:10])
    assert table[10].endswith("not recorded")
    assert "layer 47" in inspect("routes", "demo", "--layer", "47")


def test_without_the_engines_record_only_the_learners_routes_are_shown(tmp_path, inspect) -> None:
    run = write_run(tmp_path)
    (run / "routes" / "engine-generator-0.0.routes").unlink()
    text = inspect("routes", "demo")
    assert "the engine's record of these tokens is not among the files" in text
    assert text.count("[") >= 10 * LAYERS


def test_text_that_could_upset_a_terminal_or_the_table_is_made_visible(tmp_path, inspect) -> None:
    odd = build_byte_tokenizer().encode("\x1b\n[b]", add_special_tokens=False)

    def change(trained, calls):
        tokens = trained.token_ids.copy()
        tokens[: len(odd)][:3] = odd[:3]
        calls = [call(c.turn, [*odd[:3], *c.prompt_ids[3:]], c.token_ids, c.rows, start=c.routes_from) for c in calls]
        calls = [msgspec.structs.replace(c, trajectory_id=LAST) for c in calls]
        return msgspec.structs.replace(trained, token_ids=tokens), calls

    write_run(tmp_path, change=change)
    text = inspect("routes", "demo")
    assert "\x1b" not in text
    assert "\\x1b" in text
    assert "recorded 9 of 10" in text


def test_an_end_that_was_not_sampled_is_injected() -> None:
    tokens = np.asarray([5, 6, END, END, 5, 9, END, 5, 9, END])
    mask = np.asarray([0, 1, 1, 0, 0, 1, 0, 0, 1, 0], bool)
    expected = ["prompt", "sampled", "sampled", "observation", "observation", "sampled", "injected", "observation"]
    assert label_token_roles(tokens, mask, END) == [*expected, "sampled", "injected"]
    assert label_token_roles(tokens, mask, None)[6] == "observation"
    assert label_token_roles(tokens, np.zeros(10, bool), END) == ["prompt"] * 10


def test_ids_stand_for_tokens_where_there_is_no_tokenizer(tmp_path, inspect) -> None:
    run = write_run(tmp_path)
    (run / "init" / "tokenizer.json").unlink()
    text = inspect("routes", "demo")
    assert "#10" in text


# --- what is not there


def test_the_overview_says_what_there_is(tmp_path, inspect) -> None:
    run = write_run(tmp_path)
    (tmp_path / "runs" / "latest").symlink_to("demo")
    for words in ((), ("demo",), ("runs/latest",), (str(run),)):
        text = inspect(*words)
        assert text.startswith("demo")
        assert "2 trajectories of 2 steps (1 to 11)" in text
        assert f"{LAST} of step 11" in text
        assert "inspect verify" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demi"], "no run 'demi'; did you mean 'demo'?"),
        (["xyzzy"], "no run 'xyzzy'; there are: demo"),
        (["runs"], "runs is not the directory of a run"),
        (["routes", "demo", "--step", "9"], "no routes of step 9 were kept; the nearest step that has some is 11"),
        (["routes", "demo", "--trajectory", "g00000040e0001"], f"did you mean '{LAST}'?"),
        (["routes", "demo", "--layer", "3"], "there is no MoE layer 3: there are 0 to 2"),
    ],
)
def test_what_is_not_there_is_one_line_that_helps(tmp_path, inspect, words, message) -> None:
    write_run(tmp_path)
    text = inspect(*words, code=2)
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("off", '`routing.trace` was "off"; train with routing.trace="sample"'),
        ("all", "no step of an MoE model"),
    ],
)
def test_a_run_without_routes_names_the_setting(tmp_path, inspect, trace, message) -> None:
    run = tmp_path / "runs" / "bare"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'[routing]\ntrace = "{trace}"\n')
    assert message in inspect("bare")
    for command in ("routes", "verify"):
        assert message in inspect(command, "bare", code=2)


def test_a_terminal_gets_colour(tmp_path) -> None:
    from r3async.tools.inspect.routes import print_routes
    from r3async.views.episodes import RunTokenizer

    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")
    run = write_run(tmp_path)
    print_routes(run, RunTokenizer(run), console)
    assert "\x1b[1;31m" in console.file.getvalue()
