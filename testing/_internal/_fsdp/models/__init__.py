"""Test models, one module per family."""
