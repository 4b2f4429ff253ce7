"""Text tower of CLIP and learned prompts of identities (Li et al. 2023, arXiv:2211.13977)."""

import torch
from torch import nn

from clipreid.tokenizer import CONTEXT, Tokenizer
from fastamp.modeling.backbones.clip import ResidualBlock, ResidualBlocks
from fastamp.utils.errors import ConfigError

VECTORS = 4
"""Number of learned vectors of an identity."""
PLACEHOLDER = "X X X X"
# Tokens of the published prompts, so that these do not need a vocabulary.
_PUBLISHED = {
    "A photo of a X X X X person.": [49406, 320, 1125, 539, 320, 343, 343, 343, 343, 2533, 269, 49407],
    "A photo of a X X X X vehicle.": [49406, 320, 1125, 539, 320, 343, 343, 343, 343, 5299, 269, 49407],
}


def prompt_tokens(prompt: str, vocabulary: str = "") -> tuple[list[int], int]:
    """Return the tokens of a prompt, without padding, and the position of its first learned vector.

    Args:
        prompt: text with the placeholder ``X X X X``.
        vocabulary: file of a ``Tokenizer``. Default "": only the published prompts are known.

    Raises:
        ConfigError: if the prompt has no placeholder, or is not a published one and there is no vocabulary.
    """
    before, placeholder, _ = prompt.partition(PLACEHOLDER)
    if not placeholder:
        raise ConfigError(
            f"CLIPREID.PROMPT: {prompt!r} contains no {PLACEHOLDER!r}, the place of the learned vectors.\n"
            '  fix: write a prompt such as "A photo of a X X X X person."'
        )
    if vocabulary:
        tokenizer = Tokenizer(vocabulary)
        return tokenizer.encode(prompt), len(tokenizer.encode(before)) - 1
    if prompt not in _PUBLISHED:
        raise ConfigError(
            f"CLIPREID.PROMPT: {prompt!r} requires a vocabulary, but CLIPREID.VOCABULARY is empty.\n"
            "  fix: set CLIPREID.VOCABULARY to bpe_simple_vocab_16e6.txt.gz of OpenAI's CLIP, or CLIPREID.PROMPT to "
            f"{' or '.join(map(repr, _PUBLISHED))}"
        )
    return list(_PUBLISHED[prompt]), 5


class PromptLearner(nn.Module):
    """Embeddings of the prompts: the words are fixed, the vectors at the placeholder are learned for each identity.

    Args:
        num_classes: number of identities.
        width: width of the token embeddings.
        start: position of the first learned vector.
        length: number of tokens of the prompt, with start and end of text.

    Attributes:
        identities: (num_classes,) int64, CRC-32 of the names of the identities; 0 if not known.
    """

    classifiers = ("cls_ctx", "identities")
    sparse_gradients = True  # only the identities of a batch have gradients

    identities: torch.Tensor

    def __init__(self, num_classes: int, width: int, *, start: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.cls_ctx = nn.Parameter(torch.randn(num_classes, VECTORS, width) * 0.02)
        self.register_buffer("token_prefix", torch.zeros(1, start, width))
        self.register_buffer("token_suffix", torch.zeros(1, CONTEXT - start - VECTORS, width))
        self.register_buffer("identities", torch.zeros(num_classes, dtype=torch.int64))

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: all."""
        return ("token_prefix", "token_suffix", "identities")

    def set_words(self, tokens: list[int], embedding: torch.Tensor) -> None:
        """Set the embeddings of the words from CLIP's token embedding (vocabulary, width); the padding is token 0.

        Raises:
            ConfigError: if the embedding has too few rows.
        """
        if max(tokens) >= len(embedding):
            raise ConfigError(
                f"the prompt contains token {max(tokens)}, but token_embedding.weight of the weights file has "
                f"{len(embedding)} rows.\n  fix: set CLIPREID.VOCABULARY to the file that the weights were trained with"
            )
        rows = embedding[torch.tensor(tokens + [0] * (CONTEXT - len(tokens)))].float()[None]
        start = self.token_prefix.shape[1]
        self.token_prefix.copy_(rows[:, :start])
        self.token_suffix.copy_(rows[:, start + VECTORS :])

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (B, length, width) of the prompts of identities (B,) int64.

        Later positions are padding, which causal attention hides from the last token.
        """
        count = len(labels)
        parts = (self.token_prefix.expand(count, -1, -1), self.cls_ctx[labels], self.token_suffix.expand(count, -1, -1))
        return torch.cat(parts, dim=1)[:, : self.length]


class TextEncoder(nn.Module):
    """Text tower: causal transformer, and the projection of the last token.

    Args:
        width: width of the tokens.
        blocks: number of blocks.
        embedding: width of the text features.
        quick_gelu: see ``fastamp.modeling.backbones.clip``.
    """

    def __init__(self, *, width: int, blocks: int, embedding: int, quick_gelu: bool = True) -> None:
        super().__init__()
        heads = max(width // 64, 1)
        self.positional_embedding = nn.Parameter(torch.randn(CONTEXT, width) * 0.01)
        self.transformer = ResidualBlocks(
            [ResidualBlock(width, heads, causal=True, quick_gelu=quick_gelu) for _ in range(blocks)]
        )
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, embedding) * width**-0.5)

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        """Map prompts (B, length, width), which end with the end of text, to features (B, embedding)."""
        tokens = prompts + self.positional_embedding[: prompts.shape[1]]
        return self.ln_final(self.transformer(tokens)[1][:, -1]) @ self.text_projection
