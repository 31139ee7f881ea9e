"""Models of longhaul as architectures of transformers: one table each, read in both directions.

`config.json` and the names of tensors follow from the table. A model is expressible if what its
table makes of it is read back as the same model, so that an option that no table knows is never
lost: a model with another value than the default of it is not expressible.
"""
