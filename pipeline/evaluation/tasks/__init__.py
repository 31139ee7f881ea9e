"""The tasks of `longhaul evaluate`, one module each.

To add a task, copy context.py, the shortest one with a table and a figure, and register it in
../registry.py. The function `check(trained, options)` of a task raises ValueError for what the task
cannot measure; it is called before the first of several tasks runs, which may take hours. The
function `measure(trained, options, folder)` writes files into the folder, and returns their paths
with the task's numbers as a TaskResult.
"""
