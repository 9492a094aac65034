"""The resolver: selected positions in, physical locations and a copy plan out.

`oracle` is the plain-Python definition, `cpu` the compiled op; both take a `ResolveInputs` and give a
`Resolution`. The contract is Section 3.2 of the method: tail and ready map, hot scan, LRU victims, host
misses (each distinct row once per request), staging overflow.
"""

from trtllm_hisparse.resolver.base import CopyPlan, Resolution, ResolveCounts, ResolveInputs
from trtllm_hisparse.resolver.cpu import resolve

__all__ = ["CopyPlan", "Resolution", "ResolveCounts", "ResolveInputs", "resolve"]
