"""Loads the plugin behind ``pytest --slots``, for a checkout that is not installed."""

pytest_plugins = ("torch_ext.runner.pytest_plugin",)
