"""Quantizers of papers outside kvq's own sources, and the cache formats of inference engines."""

from kvq.config.plugins import Plugin

PLUGIN = Plugin("kvq_zoo", has_versions=True)
