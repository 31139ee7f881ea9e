"""What the Triton kernels of several ops share: launches, chunks, rows, arithmetic."""
