"""TinyViT: shapes, independence of windows, folded batch norms, and the way the published weights are read."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marigold_uq.models.tiny_vit import TinyViT, WindowAttention, mobile_sam_weights

SMALL = {
    "widths": (8, 8, 12, 16),
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 2, 3, 2),
    "windows": (3, 3, 4, 3),
    "neck_channels": 6,
}


def small() -> TinyViT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TinyViT(**SMALL).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (33, 50)])
def test_features_have_the_promised_strides_for_any_size(size: tuple[int, int]) -> None:
    network = small()
    maps = network(torch.rand(2, 3, *size) * 2 - 1)
    assert [own.shape[1] for own in maps] == list(network.channels)
    for own, stride in zip(maps, network.strides, strict=True):
        assert tuple(own.shape[-2:]) == tuple(math.ceil(edge / stride) for edge in size)
        assert own.isfinite().all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_later_stages_go_on_from_kept_features_and_they_alone_learn(stage: int) -> None:
    network = small()
    pixels = torch.rand(1, 3, 48, 80) * 2 - 1
    whole = network(pixels)
    network.learn_after(stage)
    again = network.after(stage, whole[stage].detach())
    torch.testing.assert_close(again, whole[stage:])
    again[-1].square().mean().backward()
    learning = {name for name, own in network.named_parameters() if own.grad is not None}
    first = [f"stages.{stage}.downsample.", *(f"stages.{later}." for later in range(stage + 1, 4)), "neck."]
    assert learning == {name for name, _ in network.named_parameters() if name.startswith(tuple(first))}


def test_nothing_follows_the_last_stage() -> None:
    with pytest.raises(ValueError, match="got stage 3 of 4"):
        small().after(3, torch.zeros(1, 16, 3, 3))


def test_the_full_size_has_the_published_number_of_weights() -> None:
    """6.07 M in the MobileSAM paper with the classifier's norm and head and with batch norms; without them 5,738,964.

    A count of the authors' file: 1,000 x 321 + 2 x 320 are the classifier, and a batch norm of C channels is 2 C.
    """
    assert sum(parameter.numel() for parameter in TinyViT().parameters()) == 5_738_964


def test_attention_is_that_of_the_formula() -> None:
    """softmax(q k / sqrt(c) + bias(|dy|, |dx|)) v, token by token."""
    torch.manual_seed(0)
    attention = WindowAttention(channels=6, num_heads=2, window=3)
    nn.init.normal_(attention.attention_biases)
    x = torch.randn(1, 9, 6)
    mixed = attention.qkv(attention.norm(x))[0]  # (9, 18): per head q, k, v of 3 channels each
    out = torch.zeros(9, 6)
    for head in range(2):
        q, k, v = mixed[:, 9 * head : 9 * head + 9].split(3, dim=1)
        for i in range(9):
            logits = torch.stack(
                [
                    q[i] @ k[j] / math.sqrt(3)
                    + attention.attention_biases[head, 3 * abs(i // 3 - j // 3) + abs(i % 3 - j % 3)]
                    for j in range(9)
                ]
            )
            out[i, 3 * head : 3 * head + 3] = logits.softmax(0) @ v
    torch.testing.assert_close(attention(x)[0], attention.proj(out))


def test_windows_do_not_see_each_other_in_the_attention() -> None:
    block = small().stages[1].blocks[0]
    x = torch.randn(1, 8, 6, 6)
    other = x.clone()
    other[..., 3:, 3:] += torch.randn(1, 8, 3, 3)
    changed = (block._attend(x) - block._attend(other)).abs().amax((0, 1)) > 1e-6
    assert changed[3:, 3:].all()
    assert not changed[:3].any()
    assert not changed[:, :3].any()


def published(network: TinyViT) -> dict[str, Tensor]:
    """A state dict in the authors' names, with random batch norms, whose folded form has other weights."""
    state: dict[str, Tensor] = {"prompt_encoder.unused": torch.zeros(1)}
    for name, module in network.named_modules():
        theirs = name.replace("patch_embed.", "patch_embed.seq.").replace("stages.", "layers.", 1)
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            channels = module.out_channels
            state[f"image_encoder.{theirs}.c.weight"] = torch.randn_like(module.weight)
            for key in ("weight", "bias", "running_mean"):
                state[f"image_encoder.{theirs}.bn.{key}"] = torch.randn(channels)
            state[f"image_encoder.{theirs}.bn.running_var"] = torch.rand(channels) + 0.5
            state[f"image_encoder.{theirs}.bn.num_batches_tracked"] = torch.tensor(7)
        else:
            for key, value in module.named_parameters(recurse=False):
                state[f"image_encoder.{theirs}.{key}"] = torch.randn_like(value)
    state |= {"image_encoder.norm_head.weight": torch.ones(16), "image_encoder.head.bias": torch.ones(1000)}
    return state


def test_every_published_weight_finds_its_place_and_batch_norms_are_folded() -> None:
    network = small()
    torch.manual_seed(1)
    theirs = published(network)
    network.load_state_dict(mobile_sam_weights(theirs))  # strict
    x = torch.randn(1, 3, 16, 16)
    plain = F.conv2d(x, theirs["image_encoder.patch_embed.seq.0.c.weight"], stride=2, padding=1)
    norm = [theirs[f"image_encoder.patch_embed.seq.0.bn.{key}"] for key in ("running_mean", "running_var")]
    gain = [theirs[f"image_encoder.patch_embed.seq.0.bn.{key}"] for key in ("weight", "bias")]
    torch.testing.assert_close(network.patch_embed[0](x), F.batch_norm(plain, *norm, *gain), rtol=1e-4, atol=1e-4)


def test_a_file_without_an_image_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="image_encoder"):
        mobile_sam_weights({"mask_decoder.weight": torch.zeros(1)})
