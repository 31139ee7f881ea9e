"""The tasks of `longhaul evaluate`, one module each.

To add a task, copy context.py, the shortest one with a table and a figure, and register it in
../registry.py. The function `measure(trained, options, folder)` of a task writes files into the
folder, and returns their paths with the task's numbers as a TaskResult.
"""
