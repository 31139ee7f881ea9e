"""What can be measured on a model."""
