#!/bin/sh
# `longhaul` from a checkout that is not installed, with the packages that python3 has:
#   sh uninstalled.sh verify --json verify.json --minutes 8
# The links in .typing are those that `make setup` makes; processes that it starts find them too.
set -eu
checkout=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$checkout/.typing/longhaul"
for package in pipeline modules kernels datamodules configs slurm; do
    ln -sfn "../../$package" "$checkout/.typing/longhaul/$package"
done
ln -sfn ../../pipeline/library/__init__.py "$checkout/.typing/longhaul/__init__.py"
export PYTHONPATH="$checkout/.typing${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
exec "${PYTHON:-python3}" -m longhaul.pipeline.cli "$@"
