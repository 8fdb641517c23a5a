"""The embedding of the empty prompt, the only one Marigold ever uses, as a component of a few kilobytes.

With it a pipeline needs neither text encoder (340 M parameters) nor tokenizer.
"""

from typing import Any, Self

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

__all__ = ["ModelMixin", "PromptEmbedding"]


class PromptEmbedding(ModelMixin, ConfigMixin):
    """Holds one tensor, (1, num_tokens, embedding_dim)."""

    @register_to_config
    def __init__(self, num_tokens: int = 2, embedding_dim: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(1, num_tokens, embedding_dim), requires_grad=False)

    @classmethod
    def from_tensor(cls, embedding: Tensor) -> "PromptEmbedding":
        """Wrap an embedding (1, tokens, dim), in its dtype and on its device."""
        if embedding.ndim != 3 or embedding.shape[0] != 1:
            raise ValueError(f"a prompt embedding is (1, tokens, dim); got shape {tuple(embedding.shape)}")
        module = cls(*embedding.shape[1:])
        module.embedding = nn.Parameter(embedding.detach().clone(), requires_grad=False)
        return module

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """torch's own `to`: diffusers' (0.42) warns of modules to be kept in float32 where there are none."""
        return nn.Module.to(self, *args, **kwargs)

    def forward(self, batch_size: int) -> Tensor:
        """(batch_size, tokens, dim)."""
        return self.embedding.expand(batch_size, -1, -1)


@torch.no_grad()
def encode_empty_prompt(text_encoder: nn.Module, tokenizer: Any) -> PromptEmbedding:
    """Run the text encoder once on "", without padding: [BOS, EOS], as Marigold was trained."""
    tokens = tokenizer("", padding="do_not_pad", max_length=77, truncation=True, return_tensors="pt")
    device = next(text_encoder.parameters()).device
    return PromptEmbedding.from_tensor(text_encoder(tokens.input_ids.to(device))[0])
