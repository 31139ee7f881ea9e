"""What several variants are made of: gates, scales per key, states to start from."""
