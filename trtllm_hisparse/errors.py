"""The three ways a call can fail, kept apart.

"Not now" is ``None``. A caller's mistake is a ``ValueError`` that names what, where, expected and actual
(`ConfigError`, `CheckpointError` and `RequestError` are the user-facing kinds). A broken invariant is an
`InvariantError`: it is never handled, it stops the server.
"""


class ConfigError(ValueError):
    """A configuration that cannot work: names the knob, its value and its limit."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: names the file, the tensor and what was expected."""


class RequestError(ValueError):
    """A request that cannot be served: only this request fails, the others go on."""


class InvariantError(RuntimeError):
    """Bookkeeping and memory disagree. The process must stop rather than serve another row's bytes."""
