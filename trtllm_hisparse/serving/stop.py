"""Stop strings in streamed text."""

from collections.abc import Sequence

from trtllm_hisparse.errors import RequestError


class StopStrings:
    """Finds the first stop string to be completed, wherever the pieces of the text are cut.

    Text that may still turn out to be the beginning of a stop string is held back; everything else is
    passed on at once. Of several stop strings completed by the same character the longest wins; the stop
    string and what follows it are not passed on. Work per character does not grow with the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("stop: expected non-empty strings, got an empty one")
        self._stops = tuple(stops)
        self._borders = tuple(map(_borders, stops))
        self._matched = [0] * len(self._stops)  # characters of each stop string the text now ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text to pass on, whether a stop string was completed: push no more then)."""
        self._held += text
        for end in range(len(self._held) - len(text), len(self._held)):
            char, found = self._held[end], 0
            for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                matched += stop[matched] == char
                self._matched[i] = matched
                if matched == len(stop):
                    found = max(found, matched)
            if found:
                return self._held[: end + 1 - found], True
        keep = len(self._held) - max(self._matched, default=0)
        ready, self._held = self._held[:keep], self._held[keep:]
        return ready, False

    def finish(self) -> str:
        """End of the text: what was held back."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix, its longest proper prefix that is also its suffix (length)."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
