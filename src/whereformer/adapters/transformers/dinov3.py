"""DINOv3's ViT."""

from torch import Tensor
from transformers import DINOv3ViTBackbone, DINOv3ViTModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched
from whereformer.adapters.transformers.towers import home, plain


def dinov3(model: DINOv3ViTModel | DINOv3ViTBackbone) -> Host:
    config = model.config
    dim, heads = config.hidden_size, config.num_attention_heads
    blocks = [
        Block(layer, [dispatched(layer.attention, dim, heads)], behaviour=EquippedLayer)
        for layer in model.model.layer
    ]
    own = [Own(model, "rope_embeddings", no_turns)]
    stage = (dim, heads, home(config, 1 + config.num_register_tokens))
    return plain(model.embeddings.patch_embeddings, blocks, stage, own, equal=_equal(config))


def no_turns(images: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of what computes cos and sin, [tokens that turn, head_dim] each: for no token at all."""
    none = images.new_zeros(0, 1)
    return none, none


def _equal(config: object) -> str:
    named = {"base": "rope_theta", **{name: f"pos_embed_{name}" for name in ("shift", "jitter", "rescale")}}
    return f"dinov3({', '.join(f'{ours}={getattr(config, theirs)!r}' for ours, theirs in named.items())})"


TOWERS: Hosts = {DINOv3ViTModel: dinov3, DINOv3ViTBackbone: dinov3}
