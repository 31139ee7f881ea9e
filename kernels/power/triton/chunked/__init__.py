"""The chunked form in Triton: chunk states, a scan over chunks, kernels that read the states."""
