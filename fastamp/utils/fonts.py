"""Fonts for text in any script: search fonts that contain the characters, and escape text without a font."""

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from PIL import ImageFont

# File names, in this order: Latin, Cyrillic, Greek and Arabic; then Chinese, Japanese and Korean.
_FILES = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "Arial Unicode.ttf",
    "arialuni.ttf",
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJKsc-Regular.otf",
    "NotoSansSC-Regular.otf",
    "NotoSansSC-Regular.ttf",
    "SourceHanSansSC-Regular.otf",
    "DroidSansFallbackFull.ttf",
    "DroidSansFallback.ttf",
    "wqy-zenhei.ttc",
    "wqy-microhei.ttc",
    "uming.ttc",
    "ipag.ttf",
    "fonts-japanese-gothic.ttf",
    "NanumGothic.ttf",
    "PingFang.ttc",
    "Hiragino Sans GB.ttc",
    "AppleSDGothicNeo.ttc",
    "msyh.ttc",
    "meiryo.ttc",
    "malgun.ttf",
)
# A noncharacter, which fonts draw as their symbol for missing characters.
_MISSING = "\U0010ffff"


def choose_font(text: str) -> Path | None:
    """Return the first font that contains all visible characters of ``text``; None if no font does."""
    return next((path for path in _font_files() if _contains(path, text)), None)


def drawable_text(text: str) -> tuple[str, Path | None]:
    r"""Return text that can be drawn, and a font file for it.

    If no font contains all characters, those that the first font lacks are escaped as in Python, e.g. ``\u4e2d``.

    Returns:
        ``(text, font)``; the font is None if only Pillow's default font is available, which is Latin only.
    """
    text = "".join(character if character.isprintable() else _escape(character) for character in text)
    font = choose_font(text)
    if font is not None:
        return text, font
    font = next(iter(_font_files()), None)
    return "".join(character if _contains(font, character) else _escape(character) for character in text), font


@cache
def load_font(path: Path | None, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Load a font for Pillow; None loads Pillow's default font."""
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(str(path), size)


def _escape(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode() if ord(character) > 126 else repr(character)[1:-1]


@cache
def _has_character(path: Path | None, character: str) -> bool:
    try:
        # Basic layout, because a shaped combining mark is drawn with a dotted circle, unlike the missing character.
        font = ImageFont.truetype(str(path), 16, layout_engine=ImageFont.Layout.BASIC)
        # Compared by size and pixels, because Pillow does not list the characters of a font.
        mask, missing = font.getmask(character), font.getmask(_MISSING)
        return mask.size != missing.size or bytes(mask) != bytes(missing)
    except (UnicodeError, OSError):
        return False


def _contains(path: Path | None, text: str) -> bool:
    if path is None:
        return text.isascii()
    return all(character.isspace() or _has_character(path, character) for character in text)


@cache
def _font_files() -> tuple[Path, ...]:
    """List the files of known fonts: matplotlib's font, then those of the system."""
    spec = importlib.util.find_spec("matplotlib")
    paths: dict[str, Path] = {}
    if spec is not None and spec.origin:
        bundled = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / _FILES[0]
        if bundled.is_file():
            paths[_FILES[0]] = bundled
    for folder in _font_folders():
        for parent, _, names in os.walk(folder):
            for name in names:
                if name in _FILES:
                    paths.setdefault(name, Path(parent) / name)
    return tuple(paths[name] for name in _FILES if name in paths and _loads(paths[name]))


def _loads(path: Path) -> bool:
    try:
        load_font(path, 16)
    except (OSError, ImportError):
        return False
    return True


def _font_folders() -> list[Path]:
    """Return the folders in which the operating system stores fonts."""
    home = Path.home()
    if sys.platform == "darwin":
        return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    if sys.platform == "win32":
        return [Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts"]
    data = os.environ.get("XDG_DATA_DIRS", "/usr/local/share:/usr/share").split(":")
    return [*(Path(folder) / "fonts" for folder in data if folder), home / ".local/share/fonts", home / ".fonts"]
