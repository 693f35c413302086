"""Unmodified upstream test files on our world: what ``run_test.py --upstream FILE`` loads in place of torch's own
harness.
"""
