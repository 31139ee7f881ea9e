"""The chunked form in torch: linear in T, with a state carried from chunk to chunk."""
