"""The vision towers of CLIP and SigLIP."""

from typing import Any

from transformers import CLIPVisionModel, SiglipVisionModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own
from whereformer.adapters.starts import from_table
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched
from whereformer.adapters.transformers.towers import home, nothing, plain


def clip(model: CLIPVisionModel) -> Host:
    """Positions come before the first norm."""
    return _host(model, prefix=1, first=model.pre_layrnorm)


def siglip(model: SiglipVisionModel) -> Host:
    return _host(model, prefix=0)


def _host(model: Any, prefix: int, **more: Any) -> Host:
    config, embeddings = model.config, model.embeddings
    dim, heads = config.hidden_size, config.num_attention_heads
    start = from_table(embeddings.position_embedding.weight)
    blocks = [
        Block(layer, [dispatched(layer.self_attn, dim, heads)], None if number else start, EquippedLayer)
        for number, layer in enumerate(model.encoder.layers)
    ]
    own = [Own(embeddings, "position_embedding", nothing)]
    own += [Own(embeddings, "interpolate_pos_encoding", nothing, counts=False)]
    stage = (dim, heads, home(config, prefix))
    return plain(embeddings.patch_embedding, blocks, stage, own, equal="learned(antialias=False)", **more)


TOWERS: Hosts = {CLIPVisionModel: clip, SiglipVisionModel: siglip}
