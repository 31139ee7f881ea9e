"""The attention form in Triton, fused: no T × T matrix is stored."""
