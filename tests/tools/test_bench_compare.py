"""`bench all` and `bench compare`: headlines of reports, and what got worse beyond its spread."""

import json
import subprocess
import sys

import msgspec
import pytest

from dev.bench import claims, page
from dev.bench.compare import HEADLINES, Headline, compare, measures, read, run_all
from dev.bench.weights import Figure, WeightsJob
from dev.bench.weights import Report as WeightsReport
from r3async.config import ConfigError


def test_what_got_worse_is_named_and_what_its_spread_explains_is_not():
    before = [Headline("steady", 1.0, "low"), Headline("noisy", 2.0, "low", 0.5), Headline("slower", 1.0, "low")]
    before += [Headline("faster", 2.0, "low"), Headline("fewer", 4.0, "high"), Headline("gone", 1.0, "low")]
    after = [Headline("steady", 1.02, "low"), Headline("noisy", 2.8, "low"), Headline("slower", 1.1, "low", 0.05)]
    after += [Headline("faster", 1.0, "low"), Headline("fewer", 3.0, "high"), Headline("new", 1.0, "low")]
    made = compare(before, after)
    assert made.worse == ["slower", "fewer"]
    assert made.missing == ["gone", "new"]
    assert [round(d.ratio, 3) for d in made.differences] == [1.02, 1.4, 1.1, 0.5, 0.75]


def pairs(*ratios):
    side = {"cpu_seconds_per_step": 1.0, "seconds_to": {"0.7": None}, "episodes_per_second": 8.0}
    theirs = side | {"seconds_per_step": 1.0}
    return [{"ours": side | {"seconds_per_step": ratio}, "theirs": theirs} for ratio in ratios]


def test_headlines_of_whole_runs_have_the_spread_of_their_seeds(tmp_path):
    own = dict.fromkeys(("cpu_per_token_ratio", "learner_cpu_ratio", "pipeline_cpu_ratio", "trainer_cpu_ratio"), 1.5)
    own |= {"learner_idle": 0.2, "engine_idle": 0.4}
    seeds = [own | {"cpu_per_token_ratio": ratio} for ratio in (1.2, 1.5, 1.8)]
    case = {"pairs": pairs(1.0, 1.5, 2.0), "step_ratio": 1.5, "seconds_to_07_ratio": None}
    report = {"benchmark": "e2e", "a": case, "own": own | {"by_seed": seeds}}
    (tmp_path / "report.json").write_text("said before\n" + json.dumps(report) + "\n")
    found = {headline.name: headline for headline in read(tmp_path / "report.json")}
    assert found["a.step_ratio"] == Headline("a.step_ratio", 1.5, "low", pytest.approx(1 / 1.5))
    assert found["own.cpu_per_token_ratio"].spread == pytest.approx(0.6 / 1.5)
    assert found["own.engine_idle"] == Headline("own.engine_idle", 0.4, "low")
    assert "a.seconds_to_07_ratio" not in found


def test_a_file_without_a_report_is_refused(tmp_path):
    (tmp_path / "report.json").write_text("no report\n")
    with pytest.raises(ConfigError, match=r"has no report of `bench all --json`"):
        read(tmp_path / "report.json")
    with pytest.raises(ConfigError, match="there are wire"):
        run_all({"wire": dict}, ["wires"], print)


def test_every_benchmark_that_all_runs_has_headlines():
    made = measures("", quick=True, say=print)
    assert "sampling" in made
    assert set(made) <= set(HEADLINES)


def test_headlines_of_sampling_compare_the_mask_with_all_tokens_and_with_none(tmp_path):
    def scored(**k3):
        return {form: {"k3": value} for form, value in k3.items()}

    seeds = [scored(whole=2.0, masked=3.0, unmasked=30.0), scored(whole=2.0, masked=1.0, unmasked=10.0)]
    report = {"benchmark": "sampling", "seeds": [{"scored": s} for s in seeds], "support_bytes": 7.0}
    report |= {"k3_whole": 2.0, "k3_masked": 2.0, "k3_unmasked": 20.0}
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = {headline.name: headline for headline in read(tmp_path / "report.json")}
    assert found["masked_over_whole"] == Headline("masked_over_whole", 1.0, "low", 1.0)
    assert found["masked_over_unmasked"] == Headline("masked_over_unmasked", 0.1, "low", 0.0)
    assert found["support_bytes"].value == 7.0


@pytest.mark.long
def test_a_small_measurement_is_compared_with_itself(tmp_path):
    command = [sys.executable, "-m", "dev", "bench"]
    made = subprocess.run(
        [*command, "all", "--quick", "--only", "packing,wire", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=True,
    )
    (tmp_path / "a.json").write_text(made.stdout)
    names = [headline.name for headline in read(tmp_path / "a.json")]
    assert {name.partition(".")[0] for name in names} == {"packing", "wire"}
    same = [*command, "compare", "a.json", "a.json", "--json"]
    done = subprocess.run(same, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert msgspec.json.decode(done.stdout.splitlines()[-1])["worse"] == []


def test_the_tables_of_the_page_are_made_from_the_file():
    assert page.main(["--check"]) == 0
    places = [match.groups()[1:3] for text in claims.pages().values() for match in page.PLACE.finditer(text)]
    assert sorted(name for kind, name in places if kind == "bench") == sorted(page.TABLES)
    kept = [path.stem for path in page.SCIENCE.glob("*.json")]
    assert sorted({name for kind, name in places if kind == "science"}) == sorted(kept), (
        "all data is shown, and no other"
    )


def test_a_table_stands_in_its_place_and_nothing_else_changes():
    job = WeightsJob(4, 4, 128, 8, 64, "float32", "keep", "auto")
    report = WeightsReport("weights", job, 4_200_000, 135, 4, {"pause": Figure(0.023, 0.04)}, {"pause": 0.17}, 0.9, 0.1)
    own = dict.fromkeys(("cpu_per_token_ratio", "learner_cpu_ratio", "trainer_cpu_ratio", "lag_p99_ms"), 1.5)
    run = {"by_role": {"engine": 0.217}, "tokens_per_step": 2432.0, "seconds_per_step": 0.381}
    e2e = {"own": own | {"learner_idle": 0.31, "engine_idle": 0.21, "runs": [run]}}
    data = {
        "quick": True,
        "machine": {"cores": "2", "python": "3.11", "torch": "2.13"},
        "load": {"weights": 1, "e2e": 2},
    }
    data |= {"reports": {"weights": msgspec.to_builtins(report), "e2e": e2e}}
    before = (
        "# A\n\n<!-- bench: weights -->\nold\n<!-- end of weights -->\n\nb\n<!-- bench: e2e -->\n<!-- end of e2e -->\n"
    )
    made = page.written(before + "<!-- bench: wire -->\nas it was\n<!-- end of wire -->\n", data)
    assert made.startswith("# A\n\n<!-- bench: weights -->\nA small measurement (`--quick`) on 2 cores, Python 3.11")
    assert "| pause | 23.0 | 40.0 | 170.0 |\n<!-- end of weights -->\n\nb\n" in made
    assert "engine 217; 2432 tokens in 0.38 s." in made
    assert "as it was" in made
    assert "old" not in made
    assert page.written(made, data) == made
