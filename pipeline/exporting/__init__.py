"""Writes a checkpoint as a Hugging Face folder: weights, model code, tokenizer and model card.

`*_longhaul.py`, `architecture.py` and `stand_ins/` go into the folder, with copies of the modules
that a model needs: transformers runs them without longhaul.
"""
