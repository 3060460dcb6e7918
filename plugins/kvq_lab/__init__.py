"""Choosing a method: sensitivity, allocation, search, recommendation, leaderboard, and studies of generation."""

from kvq.config.plugins import Plugin

PLUGIN = Plugin("kvq_lab", has_versions=True)
