#!/bin/bash
#SBATCH --job-name=r3async
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue

# One Ray cluster over the nodes of the job, and one run on it:
#     sbatch docs/examples/cluster/slurm.sh moe_30b_r3 model.path=/shared/Qwen3-30B-A3B name=first
# From the repository's folder, which all nodes must see. Ten minutes before the end Slurm sends TERM: the running step is
# finished and a checkpoint written. The same command, with the same name=, resumes; so does `scontrol requeue`.
# Variables of NCCL that are exported before sbatch reach all nodes (docs/scaling.md).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
port=${RAY_PORT:-6379} dashboard=${RAY_DASHBOARD_PORT:-8265} wait_s=${NODES_WAIT_S:-300}
bin=$PWD/.venv/bin nodes=${SLURM_JOB_NUM_NODES:-1}
# Slurm runs this script on the job's first node, the head. It is known by Slurm's name for it, and by the address from which
# it reaches another node; Ray takes those of the others by their route to the head. Ranks and NCCL use these interfaces.
node=${SLURMD_NODENAME:-$(hostname -s)} address=$(hostname -I | cut -d' ' -f1)
if [ "$nodes" -gt 1 ]; then
  peer=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "$node" | sed -n 1p)
  address=$("$bin/python" -c '
import socket, sys
route = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
route.connect((sys.argv[1], 9))  # which sends nothing
print(route.getsockname()[0])' "$peer")
fi
api=http://127.0.0.1:$dashboard
job=slurm-${SLURM_JOB_ID:-$$}
head='' workers=''

# A mistake in the command line is named before anything starts.
"$bin/r3async" train "$@" --dry-run || exit 2

# A cluster has its own token: other users of these hosts cannot start anything on it.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/.$job.token
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

# A line that is cut for less breaks no connection (docs/scaling.md).
export RAY_grpc_keepalive_timeout_ms=120000

finish() {
  for process in $workers $head; do kill "$process" 2>/dev/null && wait "$process" || true; done
  rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap finish EXIT

# Another Ray on a host (of another job, or a run on one host) may have the usual port of the agent that takes jobs: 0 is any.
agent=--dashboard-agent-listen-port=0
"$bin/ray" start --head --block --node-ip-address="$address" --port="$port" --dashboard-port="$dashboard" "$agent" &
head=$!
if [ "$nodes" -gt 1 ]; then
  # Without --cpu-bind=none the one task of a node, which is all of Ray there, may be bound to one core.
  srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$node" --cpu-bind=none \
    "$bin/ray" start --block --address="$address:$port" "$agent" &
  workers=$!
fi

# The nodes join one by one: until they hold the run, a dry run exits with 1 and the reason.
until "$bin/r3async" submit "$@" --dry-run --address "$api" > /dev/null; do
  kill -0 "$head" || { echo "the head of the Ray cluster ended" >&2; exit 1; }
  [ $SECONDS -lt "$wait_s" ] || { echo "the cluster does not hold the run after $wait_s s" >&2; exit 1; }
  sleep 5
done

"$bin/r3async" submit "$@" --address "$api" --id "$job" --runs "$PWD/runs" &
client=$!
trap '"$bin/r3async" submit stop "$job" --address "$api"' TERM
status=0
while kill -0 "$client" 2>/dev/null; do wait "$client" && status=0 || status=$?; done
exit "$status"
