"""The modules behind ``common_distributed``: skips, timeouts, helpers, and one file for each base class."""
