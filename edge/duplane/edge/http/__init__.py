"""The edge's HTTP routes, one file per group of paths, and the pure functions that render answers.

The WebSockets are routes, too: see `session_routes.py`.
"""
