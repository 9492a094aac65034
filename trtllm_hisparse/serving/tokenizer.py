"""The checkpoint's tokenizer, and detokenisation one token at a time."""

import codecs
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from trtllm_hisparse.errors import CheckpointError
from trtllm_hisparse.models.byte_level import BYTE_OF_CHAR


class Tokenizer:
    """`tokenizer.json` of a checkpoint, and the end-of-sequence ids of its configuration.

    eos_ids: token ids that end the model's output; from generation_config.json, else config.json.

    Raises CheckpointError for a file that is missing or corrupt. Only byte-level decoders are read (GLM,
    DeepSeek and Mistral checkpoints have one): their tokens are bytes, so text can be streamed exactly.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        path = Path(checkpoint) / "tokenizer.json"
        decoder = _read_json(path).get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            found = decoder.get("type") if isinstance(decoder, dict) else decoder
            raise CheckpointError(f"{path}: decoder: expected ByteLevel, got {found}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        # A tokenizer may carry training-time limits; here the runtime refuses what is too long.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.eos_ids = _eos_ids(Path(checkpoint))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, with the special tokens the tokenizer adds by itself."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of all the ids at once, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids)))

    def detokenizer(self) -> "Detokenizer":
        """A new incremental decoder, for one output."""
        return Detokenizer(self)

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - one tokenizer lives as long as its process
    def token_bytes(self, token_id: int) -> bytes:
        """Bytes one token stands for; none for a special or unknown id, as in `decode`."""
        if token_id in self._special_ids:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token spelt in plain text
            return str(token).encode()


class Detokenizer:
    """Token ids to text, incrementally; every token is decoded once.

    The pieces, `finish` included, concatenate to `Tokenizer.decode` of all the ids. A piece never ends
    inside a UTF-8 sequence: the bytes of an unfinished character wait for the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became complete with these ids; may be empty."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        """End of output: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _eos_ids(checkpoint: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json if it is there, else of config.json; one id or a list."""
    path = checkpoint / "config.json"
    values = _read_json(path)
    generation = checkpoint / "generation_config.json"
    if generation.exists() and "eos_token_id" in (overrides := _read_json(generation)):
        path, values = generation, overrides
    eos = values.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id: expected a token id or a list of them, got {eos!r}")
    return frozenset(ids)
