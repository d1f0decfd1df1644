"""The vision towers of CLIP and SigLIP."""

from typing import Any

from transformers import CLIPVisionModel, SiglipVisionModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Block, Host, Own
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched
from whereformer.adapters.transformers.towers import home, learned_from, nothing, pair, plain


def clip(model: CLIPVisionModel) -> Host:
    return _host(model, prefix=1)


def siglip(model: SiglipVisionModel) -> Host:
    return _host(model, prefix=0)


def _host(model: Any, prefix: int) -> Host:
    config, embeddings = model.config, model.embeddings
    dim, heads = config.hidden_size, config.num_attention_heads
    start = learned_from(embeddings.position_embedding.weight)
    blocks = [
        Block(layer, [dispatched(layer.self_attn, dim, heads)], None if number else start, EquippedLayer)
        for number, layer in enumerate(model.encoder.layers)
    ]
    own = [Own(embeddings, "position_embedding", nothing)]
    own += [Own(embeddings, "interpolate_pos_encoding", nothing, counts=False)]
    return plain(embeddings, blocks, (dim, heads, home(config, prefix)), pair(config.patch_size), own)


TOWERS: Hosts = {CLIPVisionModel: clip, SiglipVisionModel: siglip}
