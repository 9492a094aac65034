"""ModelSpec: which layer selects, which layer stores, and everything the hierarchy derives from it.

A spec is data. For each layer it says whose selection the layer reads (`index`), whose payload it reads
(`payload`) and whose index keys its selection is scored on (`index_keys`); a layer that names itself
*produces* the selection, *owns* the payload, *stores* the keys. Terms: architecture, "Words".

    GLM full        index=i     payload=i        own keys
    GLM shared      index=j<i   payload=i        follower: the producer's positions, bytes of its own
    Reuse           index=j<i   payload=s<i      inherits the location vector together with the payload
    Reindex         index=i     payload=s<i      a fresh selection over the same source and cache state
    window only     index=None                   keeps no history in the hierarchy
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LayerSpec:
    """Roles of one layer; every field is the number of a layer at or below it, or None.

    index:      layer whose top-k selection this layer attends over; None = no sparse history.
    payload:    layer that owns the rows this layer reads; None exactly when `index` is None.
    index_keys: for a producer, the layer that stores the index keys it scores; None = its own.
    """

    index: int | None
    payload: int | None
    index_keys: int | None = None


@dataclass(frozen=True)
class CacheState:
    """What one resolver call works on: one set of hot-slot owners, one LRU order.

    producer: first layer that resolves in it.
    members:  layers that own a payload store with these positions, in execution order (GLM up to 4).
    """

    producer: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A sparse-attention model as the KV hierarchy sees it.

    name:            the model's public name.
    layers:          one `LayerSpec` per decoder layer, in execution order.
    top_k:           rows each query selects (k).
    row_bytes:       {payload owner: bytes of one stored row}; a plain int when all owners agree.
    index_row_bytes: bytes of one index-key row.
    tokens_per_row:  {payload owner: m, token positions packed into one row}; a plain int when all agree.
    max_context:     token positions the model supports.
    source:          where the sizes come from; states what is assumed.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    top_k: int
    row_bytes: int | dict[int, int]
    index_row_bytes: int
    tokens_per_row: int | dict[int, int] = 1
    max_context: int = 1 << 20
    source: str = ""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"{self.name}: top_k must be at least 1, got {self.top_k}")
        for i, layer in enumerate(self.layers):
            if (layer.index is None) != (layer.payload is None):
                raise ValueError(f"{self.name}: layer {i} needs both index and payload, or neither: {layer}")
            if layer.index is None:
                continue
            for field in ("index", "payload", "index_keys"):
                at = getattr(layer, field)
                if at is not None and not 0 <= at <= i:
                    raise ValueError(f"{self.name}: layer {i} {field}={at} must name a layer in 0..{i}")
            if self.layers[layer.index].index != layer.index:
                raise ValueError(f"{self.name}: layer {i} shares the index of {layer.index}, which makes none")
            assert layer.payload is not None
            if self.layers[layer.payload].payload != layer.payload:
                raise ValueError(f"{self.name}: layer {i} reads the payload of {layer.payload}, which owns none")
            if layer.index_keys is not None and self.layers[layer.index_keys].index != layer.index_keys:
                raise ValueError(f"{self.name}: layer {i} scores keys of {layer.index_keys}, which stores none")

    # -- per layer ------------------------------------------------------------------------------------
    def row_bytes_of(self, owner: int) -> int:
        """Bytes of one row in the payload store of layer `owner`."""
        return self.row_bytes if isinstance(self.row_bytes, int) else self.row_bytes[owner]

    def tokens_per_row_of(self, owner: int) -> int:
        """m of the payload store of layer `owner`."""
        return self.tokens_per_row if isinstance(self.tokens_per_row, int) else self.tokens_per_row[owner]

    # -- derived --------------------------------------------------------------------------------------
    @cached_property
    def payload_owners(self) -> tuple[int, ...]:
        """Layers with a payload store of their own."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.payload == i)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """Layers that run an indexer of their own."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.index == i)

    @cached_property
    def index_stores(self) -> tuple[int, ...]:
        """Producers that store index keys (a Reindex producer scores its source's)."""
        return tuple(i for i in self.producers if self.layers[i].index_keys in (None, i))

    @cached_property
    def cache_states(self) -> tuple[CacheState, ...]:
        """One per producer that owns rows (GLM), one per shared source (Reuse, Reindex)."""
        members: dict[int, list[int]] = {}
        for i in self.payload_owners:
            index = self.layers[i].index
            assert index is not None
            members.setdefault(index, []).append(i)
        return tuple(CacheState(p, tuple(m)) for p, m in members.items())

    @cached_property
    def state_of_payload(self) -> dict[int, int]:
        """{payload owner: position of its cache state in `cache_states`}."""
        return {m: n for n, state in enumerate(self.cache_states) for m in state.members}

    @cached_property
    def resolutions(self) -> tuple[tuple[int, int], ...]:
        """The step's resolver calls in order, as (index producer, cache state): one for each pair that occurs.

        A Reuse or shared layer whose pair was already resolved inherits the location vector.
        """
        seen: dict[tuple[int, int], None] = {}
        for layer in self.layers:
            if layer.index is not None and layer.payload is not None:
                seen.setdefault((layer.index, self.state_of_payload[layer.payload]))
        return tuple(seen)

    @property
    def resolver_calls(self) -> int:
        """Resolver calls in one step."""
        return len(self.resolutions)

    @cached_property
    def followers(self) -> tuple[int, ...]:
        """Layers that run another layer's plan for their own bytes."""
        return tuple(m for state in self.cache_states for m in state.members if m != state.producer)

    @property
    def follower_copies(self) -> int:
        """Plans run again for another member's bytes in one step."""
        return len(self.followers)

    @property
    def chi(self) -> int:
        """Payload stores live at once: the largest layer group (Section 3.4)."""
        return max((len(state.members) for state in self.cache_states), default=0)

    @property
    def row_bytes_per_token(self) -> float:
        """Payload bytes one token adds over all stores."""
        return sum(self.row_bytes_of(i) / self.tokens_per_row_of(i) for i in self.payload_owners)

    @property
    def index_bytes_per_token(self) -> float:
        """Index-key bytes one token adds over all stores."""
        return sum(self.index_row_bytes / self.tokens_per_row_of(i) for i in self.index_stores)
