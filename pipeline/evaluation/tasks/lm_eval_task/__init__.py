"""The task that longhaul brings for lm_eval, and the script that runs lm_eval."""
