"""Test models, one module for each family."""
