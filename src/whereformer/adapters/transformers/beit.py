"""BEiT, and what its kin share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import BeitModel

from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Block, Host, Own, Start
from whereformer.adapters.starts import from_table, from_tables
from whereformer.adapters.transformers.dispatch import EquippedLayer, dispatched
from whereformer.adapters.transformers.towers import home, plain
from whereformer.encodings import BEiT


def beit(model: BeitModel) -> Host:
    dim, heads = model.config.hidden_size, model.config.num_attention_heads
    shared = model.shared_position_bias
    found, own = [], [] if shared is None else [Own(model, "shared_position_bias")]
    for layer in model.layers:
        mine: Any = layer.relative_position_bias
        found.append(dispatched(layer.attention, dim, heads, start=bias_from(shared or mine)))
        own += [] if mine is None else [Own(layer, "relative_position_bias")]
    return with_class_token(model, model.layers, found, own)


def with_class_token(model: Any, layers: Any, found: Sequence[Attention], own: Sequence[Own]) -> Host:
    """The host of a model that may add a learned table to tokens, beside what its attentions say."""
    config, embeddings = model.config, model.embeddings
    rows = embeddings.position_embeddings
    start = None if rows is None else from_table(rows[0])
    blocks = [
        Block(layer, [attention], None if number else start, EquippedLayer)
        for number, (layer, attention) in enumerate(zip(layers, found, strict=True))
    ]
    equal = ["beit(stretch='bilinear')"] if own else []
    if rows is not None:
        own = [Own(embeddings, "position_embeddings"), *own]
        equal = ["learned(antialias=False)", *equal]
    stage = (config.hidden_size, config.num_attention_heads, home(config, prefix=1))
    more = {"first": embeddings.dropout, "equal": " + ".join(equal) or "none"}
    return plain(embeddings.patch_embeddings, blocks, stage, own, **more)


def bias_from(own: Any) -> Start | None:
    """Lets a table of biases go on from that of a model's relative position bias."""
    if own is None:
        return None
    rows: Tensor = own.relative_position_bias_table
    return from_tables(BEiT, table=rows[:-3].mT, prefix=rows[-3:].mT)


TOWERS: Hosts = {BeitModel: beit}
