"""Makes runs of models that others have trained."""
