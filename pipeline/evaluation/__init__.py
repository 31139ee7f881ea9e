"""What can be measured on a trained model.

tasks/ has one module per task, and registry.py their names; tasks/__init__.py says how to add one.
"""
