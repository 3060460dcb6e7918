"""Choosing a method: sensitivity, allocation, search, recommendation, leaderboard, and studies of generation."""

from kvq.config.plugins import Plugin

_COMMANDS = {name: f"kvq_lab.{name}" for name in ("allocate", "choose", "export", "leaderboard")}
_TASKS = ("conversation", "limit", "reuse", "sensitivity", "speculate", "tools", "trajectory")
PLUGIN = Plugin(
    "kvq_lab",
    has_versions=True,
    settings="kvq_lab.settings",
    commands=_COMMANDS | {"recommend": "kvq_lab.advisor"},
    modules={"figures": ["kvq_lab.figures", "kvq_lab.totals"]},
    tasks={name: f"kvq_lab.{name}" for name in _TASKS} | {"drift": "kvq_lab.trajectory"},
)
