"""Readers of files that hold many texts, each with the number of its record."""
