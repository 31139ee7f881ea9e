"""One module per command of `longhaul`: its arguments, one call, and the exit status.

Each module has `add_arguments(parser)` and `main(args)`, which pipeline/cli.py calls. Code
that imports torch, Lightning or MLflow is imported inside `main`, not at the top of the module: it
takes seconds, and `longhaul COMMAND --help` should answer at once.
"""
