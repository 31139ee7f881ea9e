"""Writes a checkpoint as a Hugging Face folder: weights, model code, tokenizer and model card.

`*_longhaul.py` are copied into the folder, where transformers runs them without longhaul.
"""
