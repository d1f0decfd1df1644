"""`whereformer models`: a sample of every family, and with WHEREFORMER_WALK=1 all of timm's architectures."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from whereformer import InputError, equip
from whereformer.adapters.attends import attending
from whereformer.adapters.models import Share, architectures, look, names
from whereformer.adapters.timm import HOSTS
from whereformer.cli import main

SAMPLE = {
    "VisionTransformer": "vit_tiny_patch16_224",
    "Eva": "eva02_tiny_patch14_224",
    "Beit": "beit_base_patch16_224",
    "VisionTransformerRelPos": "test_vit_relpos",
    "VisionTransformerSAM": "samvit_base_patch16",
    "NaFlexVit": "naflexvit_base_patch16_gap",
    "Qwen3VitEncoder": "qwen3_vit_88m_enc",
    "Qwen3VitClassifier": "qwen3_vit_88m",
    "DeepseekVitEncoder": "deepseek_vit_412m_enc",
    "DeepseekVitClassifier": "deepseek_vit_412m",
    "Gemma4VitEncoder": "gemma4_vit_167m_enc",
    "Gemma4VitClassifier": "gemma4_vit_167m",
    "Cait": "cait_xxs24_224",
    "ConVit": "convit_tiny",
    "TNT": "tnt_s_patch16_224",
    "CrossVit": "crossvit_tiny_240",
    "PoolingVisionTransformer": "pit_ti_224",
    "VOLO": "volo_d1_224",
    "Xcit": "xcit_nano_12_p16_224",
    "CoaT": "coat_lite_tiny",
    "Twins": "twins_svt_small",
    "PyramidVisionTransformerV2": "pvt_v2_b0",
    "SwinTransformer": "swin_tiny_patch4_window7_224",
    "SwinTransformerV2": "swinv2_tiny_window8_256",
    "SwinTransformerV2Cr": "swinv2_cr_tiny_224",
    "MaxxVit": "maxvit_rmlp_pico_rw_256",
    "DaVit": "davit_tiny",
    "GlobalContextVit": "gcvit_xxtiny",
    "TinyVit": "tiny_vit_5m_224",
    "Nest": "nest_tiny",
    "Levit": "levit_128s",
    "LevitDistilled": "levit_128",
    "EfficientFormer": "efficientformer_l1",
    "EfficientFormerV2": "efficientformerv2_s0",
    "EfficientVitMsra": "efficientvit_m0",
    "SHViT": "shvit_s1",
    "MetaFormer": "caformer_s18",
    "FastVit": "fastvit_sa12",
    "Visformer": "visformer_tiny",
    "IFormer": "iformer_t",
    "LowFormer": "lowformer_b0",
    "CPUBone": "cpubone_nano",
    "NextViT": "nextvit_small",
    "EdgeNeXt": "edgenext_xx_small",
    "CSATv2": "csatv2",
    "MobileNetV3": "mobilenetv4_hybrid_medium",
    "MobileNetV5": "mobilenetv5_300m",
    "MobileNetV5Encoder": "mobilenetv5_300m_enc",
    "ByobNet": "botnet26t_256",
    "HieraDet": "sam2_hiera_tiny",
    "Hiera": "hiera_tiny_224",
    "MultiScaleVit": "mvitv2_tiny",
}
"""One architecture of each class that has a host."""
TOKENS_ALONE = {"Xcit", "CoaT", "EdgeNeXt"}
"""Those without attention over a grid."""


def test_every_family_is_in_the_sample_and_on_the_page():
    assert SAMPLE.keys() == {kind.__name__ for kind in HOSTS}
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    for kind in HOSTS:
        assert f"| {kind.__module__.rpartition('.')[2]} |" in page


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_of_each_family_equips(kind):
    one = look(SAMPLE[kind], watch=False)
    assert one.equips
    assert one.takes["tokens"] == "all"
    heard = {one.takes[moment] for moment in ("rotations", "biases", "values")}
    assert (heard == {""}) == (kind in TOKENS_ALONE)
    assert bool(one.why) or kind not in TOKENS_ALONE
    assert one.heads * one.head_dim > 0


WATCHED = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "davit_tiny", "botnet26t_256", "levit_128s")


@pytest.mark.parametrize("name", [*WATCHED, *(SAMPLE[kind] for kind in sorted(TOKENS_ALONE))])
def test_which_attend_over_a_grid(name):
    assert look(name).attends == (name in WATCHED)


def test_what_is_said_of_one_architecture():
    one = look("vit_small_patch16_dinov3")
    assert (one.family, one.grid, one.prefix, one.heads, one.head_dim) == ("eva", (16, 16), 5, 6, 64)
    assert one.own.startswith("dinov3(base=100.0")
    assert one.equal
    assert look("vit_dwee_patch16_reg1_gap_256").takes == {
        "tokens": "all",
        "rotations": "all",
        "biases": "all",
        "values": "",
    }
    plain = look("resnet18")
    assert (plain.attends, plain.equips, plain.why) == (False, False, "no attention over a grid")


class OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return scaled_dot_product_attention(q, k, v)


class ByHand(OfTokens):
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(torch.zeros(1) > 0, 0.0)
        return nn.Softmax(-1)(scores) @ v


class OfChannels(OfTokens):
    def forward(self, x):
        q, k, v = (y.mT for y in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT).softmax(-1) @ v).mT


class OfOne(OfTokens):
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + scaled_dot_product_attention(q[:, :1], k, v)


class Gated(OfTokens):
    def forward(self, x):
        gate = x.mean(-1, keepdim=True).softmax(1)
        return x + gate.mT @ x


@pytest.mark.parametrize("kind", [OfTokens, ByHand, OfChannels, OfOne, Gated])
def test_attention_over_a_grid_is_seen(kind):
    model = nn.Sequential(nn.Linear(8, 8), kind(), Gated(), nn.Softmax(-1))
    expected = {kind} if kind in (OfTokens, ByHand) else set()
    assert attending(model, torch.randn(2, 12, 8)) == expected
    assert not torch.nn.modules.module._global_forward_hooks


def test_names():
    assert names("dinov3")
    assert all("dinov3" in name for name in names("dinov3"))
    assert names("swinv2_tiny*256") == ["swinv2_tiny_window8_256", "swinv2_tiny_window16_256"]
    with pytest.raises(
        InputError, match=r"no architecture of timm is like it \(did you mean 'vit_tiny_patch16_224'"
    ):
        names("vit_tinny_patch16_224")


def test_command(capsys):
    main(["models", "coat_lite_tiny", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["architectures"], said["attending"], said["others"]) == (1, 0, 1)
    assert said["models"][0]["name"] == "coat_lite_tiny"
    main(["models", "*t_ti_224"])
    out = capsys.readouterr().out
    assert "pit_ti_224  yes     yes   yes     yes     1 + 27 x 27    2 x 32" in out
    assert "says itself: range(0, 2): learned" in out
    assert "1 architectures, 1 attend over a grid, 1 of these equip in one call: 100.0 %." in out
    main(["models", "*resnet18"])
    assert "resnet18, seresnet18, skresnet18: no attention over a grid" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["models", "there_is_none"])
    assert left.value.code == 2


# ---------------------------------------------------------------------------------------------------------------
# All of them: minutes.

walk = pytest.mark.skipif(not os.environ.get("WHEREFORMER_WALK"), reason="takes minutes: WHEREFORMER_WALK=1")


@walk
def test_all_of_timms_architectures():
    found = list(architectures())
    share = Share.of(found)
    missed = [f"{one.name}: {one.why}" for one in found if one.attends and not one.equips]
    print("", share, *missed, sep="\n")
    assert len(found) == len(timm.list_models())
    assert not [one for one in found if one.why.startswith("cannot be looked at")]
    assert share.percent >= 95


@walk
@pytest.mark.parametrize("kind", SAMPLE)
@torch.no_grad()
def test_a_sample_of_each_family_at_full_size_speaks(kind):
    """Without numbers: what is built fits what is called."""
    with torch.device("meta"):
        model = timm.create_model(SAMPLE[kind]).eval()
    images = torch.zeros(1, *model.pretrained_cfg["input_size"], device="meta")
    before = model(images)
    one = look(SAMPLE[kind])
    equip(model, "swin" if one.takes["biases"] == "all" else "none")
    after = model(images)
    for a, b in zip(before, after, strict=True) if isinstance(before, list | tuple) else [(before, after)]:
        assert a.shape == b.shape
