"""The byte-level alphabet of GPT-2-style tokenizers: one printable character for every byte."""


def _chars() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


CHAR_OF_BYTE = _chars()
"""Printable Latin-1 stands for itself, the other bytes, in order, for U+0100 onwards."""

BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
