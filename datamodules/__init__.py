"""Shards, tokenizers, the order of samples and the LightningDataModule; preparation/ writes shards.

Import from the modules: a re-export here would make `longhaul prepare` load torch.
"""
