"""The tasks of `longhaul evaluate`, one file each: see docs/adding-a-task.md."""
