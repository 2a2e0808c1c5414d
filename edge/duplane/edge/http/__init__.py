"""The edge's plain HTTP, on the same port as the WebSockets: one file per group of paths.

What is told is rendered elsewhere, by pure functions; here is who may ask and what a request says.
"""
