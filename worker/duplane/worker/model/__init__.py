"""The speech model in torch: audio in, decisions, text and audio out, for many slots at once.

Nothing here knows about gRPC, asyncio or sessions; `DuplexModel` is what the worker uses.
"""
