"""Faults that a plan injects into the ranks of a test or a program. Loads torch only once a plan needs it."""
