"""The chunked form in Triton: states of chunks, a scan over them, kernels that read them."""
