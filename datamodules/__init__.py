"""Shards, token streams, tokenizers and the LightningDataModule that serves them.

Import from the modules: a re-export here would load torch into `longhaul prepare`.
"""
