"""Kinds with published recurrences, whose state is a matrix a head. Every module is imported."""
