"""Old names of metrics: each is refused with the name that the metric has now, wherever a person writes one."""

from pathlib import Path

import pytest

from r3async.config.load import ConfigError
from r3async.record.metrics import METRICS, find_metric, find_new_name
from r3async.tools.sweep.plan import read_sweep_plan
from r3async.views.summary import RunSummary

RENAMED = {
    "env/moves_mean": "env/moves/mean",
    "env/small/episode_tokens_p95": "env/small/response_length_p95",
    "env/small/episode_truncated_share": "env/small/response_length_clip_ratio",
    "env/small/reward_brief_mean": "env/small/rewards/brief/mean",
    "episode/tokens_mean": "response_length/mean",
    "episode/tokens_p95": "response_length/p95",
    "episode/tokens_max": "response_length/max",
    "episode/truncated_share": "response_length/clip_ratio",
    "optimizer/no_contrast": "optimizer/zero_variance",
    "reward/brief_mean": "rewards/brief/mean",
    "reward/std_of_all_std": "rewards/std_of_all/std",
    "rollout_corr/ess": "ratio/ess",
    "rollout_corr/k3_kl": "rollout_kl/k3",
    "rollout_corr/kl": "rollout_kl/k1",
    "rollout_kl/k3_age_7": "rollout_kl/k3_staleness_7",
    "served_kl/k3": "rollout_kl/served_k3",
    "served_kl/k3_age_0": "rollout_kl/served_k3_staleness_0",
    "served_kl/k3_low": "rollout_kl/served_k3_low",
    "served_kl/predicted": "rollout_kl/served_k3_predicted",
    "served_kl/tokens": "rollout_kl/served_tokens",
    "staleness/age_3": "staleness/tokens_3",
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_the_new_one_and_the_new_one_exists(tmp_path: Path, old: str) -> None:
    assert find_metric(RENAMED[old]).description != RENAMED[old]
    message = f"no run has '{old}': it is '{RENAMED[old]}' now"
    plan = tmp_path / "plan.toml"
    plan.write_text(f'metrics = ["{old}"]\n')
    with pytest.raises(ConfigError, match=message):
        read_sweep_plan(plan)
    with pytest.raises(KeyError, match=message):
        RunSummary(name="run", status="finished")[old]


def test_no_name_of_the_catalogue_is_an_old_one() -> None:
    names = [*METRICS, "rewards/brief/mean", "env/moves_mean/mean", "env/small/reward_mean", "env/small/moves/std"]
    names += ["env/small/response_length_mean", "env/small/reward_std_in_group"]
    assert [name for name in names if find_new_name(name)] == []
