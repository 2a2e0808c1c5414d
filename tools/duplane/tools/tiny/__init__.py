"""Builds a tiny checkpoint in the public format: every file real, every weight random.

A conversation with it has all the right shapes and turns, and its answers mean nothing.
"""

from duplane.tools.tiny.build import build_tiny

__all__ = ["build_tiny"]
