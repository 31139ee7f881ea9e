"""Checks of calls against float64, and the record that every op has of its own.

`longhaul verify` runs them (pipeline/verification).
"""
