"""Checks of every kernel against float64, and times of the op and its peers.

`longhaul verify` runs them (pipeline/verification).
"""
