"""The serving loop: requests, batching, step, commit, events. No transport in it."""
