"""Choosing a method: sensitivity, allocation, search, recommendation, leaderboard, and studies of generation."""

from kvq.config.plugins import Plugin

PLUGIN = Plugin(
    "kvq_lab",
    has_versions=True,
    settings="kvq_lab.settings",
    commands={
        "allocate": "kvq_lab.allocate",
        "choose": "kvq_lab.choose",
        "export": "kvq_lab.export",
        "leaderboard": "kvq_lab.leaderboard",
        "recommend": "kvq_lab.advisor",
    },
    modules={"figures": ["kvq_lab.figures", "kvq_lab.totals"]},
    tasks={
        "conversation": "kvq_lab.conversation",
        "drift": "kvq_lab.trajectory",
        "limit": "kvq_lab.limit",
        "reuse": "kvq_lab.reuse",
        "sensitivity": "kvq_lab.sensitivity",
        "speculate": "kvq_lab.speculate",
        "tools": "kvq_lab.tools",
        "trajectory": "kvq_lab.trajectory",
    },
)
