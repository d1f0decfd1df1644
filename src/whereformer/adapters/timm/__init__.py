"""timm's models as hosts, one family a file."""

from whereformer.adapters.find import Hosts
from whereformer.adapters.timm import pyramids, vit

HOSTS: Hosts = {**vit.HOSTS, **pyramids.HOSTS}
"""Which function knows which class of models."""
