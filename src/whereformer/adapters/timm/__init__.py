"""timm's models as hosts, one family a file."""

from whereformer.adapters.find import Hosts
from whereformer.adapters.timm import (
    beit,
    cait,
    convit,
    convnets,
    eva,
    maps,
    naflex,
    pooled,
    pyramids,
    sam,
    stages,
    tnt,
    vit,
    vlm,
    weightless,
    wide,
    windows,
)

HOSTS: Hosts = {
    **vit.HOSTS,
    **eva.HOSTS,
    **beit.HOSTS,
    **sam.HOSTS,
    **naflex.HOSTS,
    **vlm.HOSTS,
    **cait.HOSTS,
    **convit.HOSTS,
    **tnt.HOSTS,
    **stages.HOSTS,
    **weightless.HOSTS,
    **pyramids.HOSTS,
    **windows.HOSTS,
    **wide.HOSTS,
    **maps.HOSTS,
    **convnets.HOSTS,
    **pooled.HOSTS,
}
"""Which function knows which class of models."""
