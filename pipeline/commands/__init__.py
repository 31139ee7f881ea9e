"""One module per command of `longhaul`: its arguments, one call, and the exit status.

Each module has `add_arguments(parser)` and `main(args)`, which pipeline/cli.py calls. The
import of the code that a command runs is inside `main`, not at the top of the module: torch,
Lightning and MLflow take seconds to import, and `longhaul COMMAND --help` should take less than
0.2 s of processor time.
"""
