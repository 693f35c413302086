"""The modules behind ``common_distributed``: skips, helpers, and a file for each kind of ranks."""
