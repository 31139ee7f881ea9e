"""What is checked and timed of the delta rule."""
