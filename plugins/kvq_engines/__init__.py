"""Engines that run a model themselves (llama.cpp, MLX), and the task that compares their cache formats with kvq's."""

from kvq.config.plugins import Plugin

PLUGIN = Plugin("kvq_engines", has_versions=True)
