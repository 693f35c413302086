"""Runs an unmodified upstream test file with our harness in place of torch's: ``run_test.py --upstream FILE``."""
