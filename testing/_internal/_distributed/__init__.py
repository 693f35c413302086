"""The rooms behind ``common_distributed``: skips, timeouts, helpers, and one file for each base class."""
