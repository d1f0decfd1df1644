"""The vision encoder of SAM."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionEncoder, SamVisionSdpaAttention

from whereformer.adapters.behaviours import EquippedAttention, attend, held
from whereformer.adapters.find import Hosts
from whereformer.adapters.host import Attention, Block, Host, Image, Own, Stage, Start
from whereformer.adapters.starts import from_table, from_tables
from whereformer.adapters.transformers.dispatch import EquippedLayer
from whereformer.adapters.transformers.towers import home
from whereformer.attention import attention_weights
from whereformer.encodings import Decomposed
from whereformer.grid import Grid


def sam(model: SamVisionEncoder) -> Host:
    config = model.config
    rows = model.pos_embed
    own = [] if rows is None else [Own(model, "pos_embed")]
    blocks = []
    for number, layer in enumerate(cast(Iterable[Any], model.layers)):
        attention = layer.attn
        grids = partial(windows, size=layer.window_size)
        found = Attention(attention, grids=grids, start=_start(attention), behaviour=EquippedSamAttention)
        start = None if number or rows is None else from_table(rows.flatten(0, 2))
        blocks.append(Block(layer, [found], start, EquippedLayer))
        if attention.use_rel_pos:
            own += [Own(attention, name) for name in ("rel_pos_h", "rel_pos_w")]
            own += [Own(attention, "use_rel_pos", False, counts=False)]
    grid = home(config, prefix=0)
    equal = [*([] if rows is None else ["learned"]), *(["decomposed"] if config.use_rel_pos else [])]
    stage = Stage(config.hidden_size, config.num_attention_heads, grid, blocks, Image())
    return Host([stage], own, equal=" + ".join(equal) or "none")


def windows(attention: nn.Module, grid: Grid, *, size: int) -> tuple[Grid, Grid]:
    """Square windows; where their size is 0, the whole."""
    return (Grid(size, size), Grid(size, size)) if size else (grid, grid)


def _start(attention: Any) -> Start | None:
    if not attention.use_rel_pos:
        return None
    return from_tables(Decomposed, rows=attention.rel_pos_h, columns=attention.rel_pos_w)


class EquippedSamAttention(EquippedAttention, *((SamVisionAttention,) if TYPE_CHECKING else ())):
    """Its own projections and biases around our attention."""

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> tuple[Tensor, Tensor | None]:
        size = (hidden_states.shape[1], hidden_states.shape[2])
        heads = self.num_attention_heads
        q, k, v = self.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        bias = None
        if self.use_rel_pos:
            own = self.get_decomposed_rel_pos(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = own.flatten(1, 2).flatten(2).unflatten(0, (-1, heads))
        out = attend(self, q, k, v, bias, self.dropout if self.training else 0.0)
        weights = None
        heard = self._forward_hooks and not isinstance(self, SamVisionSdpaAttention)  # its layer asks for none
        if output_attentions or heard:
            queries, keys = self.grids(self, self.place.grid)
            weights = attention_weights(q, k, queries, held(self), keys=keys, mask=bias)
        return self.proj(out.transpose(1, 2).flatten(2).unflatten(1, size)), weights


TOWERS: Hosts = {SamVisionEncoder: sam}
