#!/bin/sh
# The demo on two sources, with a figure of the loss of each. Called by `make demo-sources`.
set -eu
python -P docs/scripts/machine_prose.py data/prose.jsonl
longhaul prepare text stdlib data/stdlib
longhaul prepare text data/prose.jsonl data/prose --doc-tokens 4k
longhaul train run/two-sources.yaml
longhaul status runs/two-sources
longhaul report demo report-sources --runs two-sources
echo
echo "Figures: report-sources/training_loss_of_sources_000512.png"
echo "         report-sources/validation_loss_of_sources_000512.png"
