"""The chunked form in plain torch: linear cost, a state between chunks."""
