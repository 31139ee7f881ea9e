"""What the kernels of several ops share; it knows none of them."""
