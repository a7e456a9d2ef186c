"""The text a generation makes: words from a seed, cut into tokens as a tokenizer cuts bytes.

Comes in: a seed (prompt and whatever changes the text) or the bytes to say. Goes out: `Pieces`, one `bytes` a token;
some are empty, some end inside a UTF-8 character whose rest is the next token, as real engines do.
"""

import random

_WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "light",
    "sea",
    "keeper",
    "storm",
    "lamp",
    "stone",
    "night",
    "wave",
    "ship",
    "harbour",
    "fog",
    "signal",
    "glass",
    "wind",
    "island",
    "tower",
    "hour",
    "clock",
    "mile",
    "shore",
    "captain",
    "letter",
    "morning",
    "rope",
    "salt",
    "engine",
    "memory",
    "expert",
    "page",
    "token",
    "cache",
    "naïve",
    "café",
    "Zürich",
    "señor",
    "灯台",
    "маяк",
    "φάρος",
    "λ→∞",
    "🌊",
    "🚢",
]


def count_tokens(text: bytes) -> int:
    """How many tokens the simulator's tokenizer makes of a prompt: at least one for each word of it."""
    return sum(-(-len(word) // 6) for word in text.split())


class Pieces:
    """The tokens of one generation, in order; `next()` returns None at an end of generation."""

    def __init__(self, seed: str, text: bytes | None) -> None:
        self._rng = random.Random(seed)
        self._waiting: list[bytes] = []
        self._text = text
        self._first = True

    def next(self, *, last: bool = False, half: bool = False) -> bytes | None:
        """The next token's bytes. `half` makes it end inside a character, `last` makes it end whole."""
        if self._text is not None:
            if not self._text and not self._waiting:
                return None
            if not self._waiting:
                piece, self._text = self._text[:4], self._text[4:]
                return piece
        if half:
            self._waiting.insert(0, "é".encode()[1:])
            return "é".encode()[:1]
        if not self._waiting:
            self._waiting = self._word()
        if last and len(self._waiting) > 1:
            out = b"".join(self._waiting)
            self._waiting = []
            return out
        return self._waiting.pop(0)

    def _word(self) -> list[bytes]:
        rng = self._rng
        roll = rng.random()
        if roll < 0.02:
            return [b""]  # a control token renders as nothing
        lead = b"" if self._first else b"\n\n" if roll < 0.04 else b" "
        self._first = False
        word = lead + rng.choice(_WORDS).encode() + (b"." if roll > 0.93 else b"")
        # byte tokens: what lies beyond ASCII comes a few bytes at a time, wherever that cuts
        cut = next((i for i, byte in enumerate(word) if byte >= 0x80), None)
        if cut is not None and rng.random() < 0.6:
            return [word[: cut + 1], word[cut + 1 :]]
        return [word]
