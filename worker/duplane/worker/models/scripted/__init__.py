"""A scripted model without weights, for tests and measurements of the other processes."""
