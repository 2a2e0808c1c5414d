"""The stages of `hour.py`, which measures the engine on a GPU of which nothing is known."""
