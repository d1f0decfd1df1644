"""BEiT, and what its relative kin share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import BeitModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Block, Host, Own, Start
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched
from whereformer.adapters.transformers.towers import home, learned_from, pair, plain, taking
from whereformer.encodings import BEiT


def beit(model: BeitModel) -> Host:
    dim, heads = model.config.hidden_size, model.config.num_attention_heads
    shared = model.shared_position_bias
    found, own = [], [Own(model, "shared_position_bias")]
    for layer in model.layers:
        start = bias_from(shared or layer.relative_position_bias)
        found.append(dispatched(layer.attention, dim, heads, start=start))
        own.append(Own(layer, "relative_position_bias"))
    return with_class_token(model, model.layers, found, own)


def with_class_token(model: Any, layers: Any, found: Sequence[Attention], own: Sequence[Own]) -> Host:
    """The host of a model that may add a learned table to tokens, beside what its attentions say."""
    config, rows = model.config, model.embeddings.position_embeddings
    start = learned_from(None if rows is None else rows[0])
    blocks = [
        Block(layer, [attention], None if number else start, EquippedLayer)
        for number, (layer, attention) in enumerate(zip(layers, found, strict=True))
    ]
    own = [Own(model.embeddings, "position_embeddings"), *own]
    stage = (config.hidden_size, config.num_attention_heads, home(config, prefix=1))
    return plain(model.embeddings, blocks, stage, pair(config.patch_size), [o for o in own if _is_there(o)])


def _is_there(own: Own) -> bool:
    return getattr(own.module, own.name, None) is not None


def bias_from(own: Any) -> Start | None:
    """Lets a table of biases go on from that of a model's relative position bias."""
    if own is None:
        return None
    rows: Tensor = own.relative_position_bias_table
    return taking(BEiT, table=rows[:-3].mT, prefix=rows[-3:].mT)


TOWERS: Hosts = {BeitModel: beit}
