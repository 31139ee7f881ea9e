"""The attention form in Triton: every pair of tokens is scored, no T × T matrix is stored."""
