#!/usr/bin/env bash
# verl 0.9.1: the bounds of rollout_rs for k1 are bounds of rollout over policy, not of the importance ratio.
#
# Guess: "0.5_3.0" keeps sequences whose importance ratio, policy over rollout, lies between 0.5 and 3, as the bounds of
# a PPO clip or of rollout_is_threshold do, and as the docstring's "ratio bounds" reads.
# Behaviour: k1 is the logarithm of rollout over policy, and the bounds' logarithms are compared with it. A sequence of
# ratio 2.5 is dropped and one of 0.4 kept; bounds that are carried over from a trainer with the usual ratio keep the
# wrong sequences unless each is replaced by the reciprocal of the other.
# Seen on Python 3.11, torch 2.13.0: kept 0.4 and 1.0, dropped 2.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 verl==0.9.1
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

ratios = torch.tensor([0.4, 1.0, 2.5])
log_ratio = ratios.log()[:, None].expand(3, 4) / 4  # of each of four tokens: policy over rollout
mask = torch.ones(3, 4)
kept, _ = compute_rollout_rejection_mask(
    log_ratio, mask, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_3.0"
)
kept = kept.bool().any(1).tolist()
print(dict(zip(ratios.tolist(), kept, strict=True)))
assert kept == [True, True, False], kept
PYTHON
