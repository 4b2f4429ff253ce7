"""Byte-pair encoding of CLIP's text tower (Radford et al. 2021, arXiv:2103.00020)."""

import gzip
import html
import itertools
import re
from pathlib import Path

from fastamp.utils.errors import ConfigError
from fastamp.utils.files import expand

CONTEXT = 77
"""Number of tokens of a text."""
_MERGES = 49152 - 2 * 256 - 2  # of OpenAI's vocabulary, whose file has more lines
_PATTERN = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|(?:[^\s\w]|_)+", re.IGNORECASE)


class Tokenizer:
    """Tokenizer with a file of merges, e.g. ``bpe_simple_vocab_16e6.txt.gz`` of OpenAI's CLIP.

    The tokens are: 256 bytes, 256 bytes that end a word, one token per merge, start of text and end of text.

    Args:
        path: text file, plain or .gz: a first line that is ignored, then one merge, two symbols, per line.

    Raises:
        ConfigError: if the file is missing or is not a list of merges.
    """

    def __init__(self, path: str) -> None:
        merges = _read_merges(Path(expand(path)))
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._bytes = _printable_bytes()
        symbols = list(self._bytes.values())
        symbols += [symbol + "</w>" for symbol in symbols] + ["".join(pair) for pair in merges]
        self._ids = {symbol: number for number, symbol in enumerate(symbols)}
        self.start, self.end = len(symbols), len(symbols) + 1

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, between start and end of text.

        Raises:
            ConfigError: if the text has more than 77 tokens.
        """
        words = _PATTERN.findall(" ".join(html.unescape(text).split()).lower())
        tokens = [self.start]
        for word in words:
            tokens += [
                self._ids[symbol] for symbol in self._merge("".join(self._bytes[byte] for byte in word.encode()))
            ]
        if len(tokens) >= CONTEXT:
            raise ConfigError(
                f"CLIPREID.PROMPT: {text!r} has {len(tokens) + 1} tokens; the text tower has {CONTEXT} positions.\n"
                "  fix: shorten CLIPREID.PROMPT"
            )
        return [*tokens, self.end]

    def _merge(self, word: str) -> list[str]:
        """Merge the pair with the lowest rank, everywhere in the word, until no pair of symbols is in the merges."""
        symbols = [*word[:-1], word[-1] + "</w>"]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == best:
                    merged[-1] += symbol
                else:
                    merged.append(symbol)
            symbols = merged
        return symbols


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"CLIPREID.VOCABULARY: file not found: {path}.\n"
            "  fix: set CLIPREID.VOCABULARY to bpe_simple_vocab_16e6.txt.gz, which is part of OpenAI's CLIP and of "
            'open_clip; the published prompts, "A photo of a X X X X person." and "... vehicle.", do not need it'
        ) from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"CLIPREID.VOCABULARY: cannot read {path}: {error}.\n  fix: download the file again"
        ) from error
    merges = [tuple(line.split()) for line in text.strip().split("\n")[1 : _MERGES + 1]]
    wrong = [number for number, pair in enumerate(merges, start=2) if len(pair) != 2]
    if wrong or not merges:
        raise ConfigError(
            f"CLIPREID.VOCABULARY: {path} is not a list of merges"
            f"{f': line {wrong[0]} does not have two symbols' if wrong else ': it has no lines'}.\n"
            "  fix: set CLIPREID.VOCABULARY to bpe_simple_vocab_16e6.txt.gz of OpenAI's CLIP"
        )
    return [(first, second) for first, second in merges]


def _printable_bytes() -> dict[int, str]:
    """Map each byte to a printable character: itself if it is printable, else a character from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = printable + [256 + number for number in range(len(others))]
    return {byte: chr(code) for byte, code in zip([*printable, *others], characters, strict=True)}
