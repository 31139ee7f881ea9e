#!/bin/sh
# The whole project once, small: text, shards, training, evaluation, a sample. Called by `make demo`.
set -eu
run=runs/demo
longhaul prepare text stdlib data/stdlib
longhaul train run/demo.yaml
longhaul evaluate "$run" --tasks positions,bigram
echo
echo "A sample:"
longhaul generate "$run" --prompt "    def test_read(self):" --tokens 200 --seed 1
echo
echo "Run folder:   $run"
echo "Figure:       $(ls -d "$run"/evaluation/*/positions.png | tail -n 1)"
echo "Open MLflow:  .venv/bin/mlflow ui --backend-store-uri sqlite:///mlflow.db"
echo "              http://127.0.0.1:5000/#/experiments?workflowType=machine_learning"
