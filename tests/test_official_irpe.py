"""IRPE against values computed by the released code (tests/data/README.md), in float64."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from whereformer import Buckets, Grid, attention
from whereformer.encodings import IRPE

DATA = Path(__file__).parent / "data"
VALUES = load_file(DATA / "irpe_reference.safetensors")
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "irpe_reference.json").read_text())
MODEL_VALUES = load_file(DATA / "irpe_models_reference.safetensors")
MODEL_CASES: dict[str, dict[str, Any]] = json.loads((DATA / "irpe_models_reference.json").read_text())

# Values of size < 100 after sums of < 100 products: 100 * 100 roundings of 2^-53 are 1e-12; 1e-10 leaves room for
# the float32 constants of either side and still sees any wrong bucket.
TOLERANCE = 1e-10


def names(cases: dict[str, dict[str, Any]], kind: str) -> list[str]:
    return [name for name in cases if name.startswith(kind + "/")]


def tensors(values: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    return {name.removeprefix(case + "/"): value for name, value in values.items() if name.startswith(case + "/")}


def our_name(official: str, on: str) -> str:
    """The name of a table in IRPE: rpe_k.rp_rows.lookup_table_weight -> tables.k_rows."""
    side = re.match(r"rpe_([qkv])\.", official)
    part = "_rows" if "rp_rows" in official else "_columns" if "rp_cols" in official else ""
    return f"tables.{side[1] if side else on}{part}"


def build(case: dict[str, Any], grid: Grid, tables: dict[str, Tensor]) -> IRPE:
    method, on, ratio = case["method"], case["on"], case["ratio"]
    heads = case["heads"] if "heads" in case else case["num_heads"]
    dim = heads * case["head_dim"] if "head_dim" in case else case["embed_dim"]
    encoding = IRPE(
        dim, heads, grid, method=method, mode=case["mode"], on=on, shared=case["shared_head"], ratio=ratio
    ).double()
    encoding.load_state_dict({our_name(name, on): table for name, table in tables.items()})
    return encoding


def check(got: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE, msg=lambda m: f"{what}: {m}")


def test_the_whole_of_it_is_here() -> None:
    assert len(names(CASES, "encoding")) == 150
    assert len(names(CASES, "attention")) == 40
    assert [len(names(MODEL_CASES, kind)) for kind in ("deit", "detr", "buckets")] == [4, 2, 12]


@pytest.mark.parametrize("name", names(CASES, "encoding"))
def test_encoding(name: str) -> None:
    case, t = CASES[name], tensors(VALUES, name)
    grid = Grid(case["height"], case["width"], case["skip"])
    tables = {key.removeprefix("param/"): value for key, value in t.items() if key.startswith("param/")}
    encoding = build(case, grid, tables)
    x = t["input"].clone().requires_grad_()
    silent = torch.zeros_like(x)
    plain = x * case["head_dim"] ** 0.5  # the released code is given scaled queries, or keys
    if case["on"] == "k":
        out = sum(bias.dense() for bias in encoding.biases(plain, silent, grid, grid))
    elif case["on"] == "q":  # its caller transposes
        out = sum(bias.dense().mT for bias in encoding.biases(silent, plain, grid, grid))
    else:
        out = sum(term.dense(x) for term in encoding.values(silent, grid, grid))
    assert isinstance(out, Tensor)
    check(out, t["output"], "output")
    (out * t["weight"]).sum().backward()
    if "grad_input" in t:
        assert x.grad is not None
        check(x.grad, t["grad_input"], "gradient of the input")
    else:
        assert case["mode"] == "bias"
        assert x.grad is None
    for key in tables:
        table = encoding.get_parameter(our_name(key, case["on"]))
        assert table.grad is not None
        check(table.grad, t["grad_param/" + key], f"gradient of {key}")


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", names(CASES, "attention"))
def test_attention(name: str, backend: str) -> None:
    case, t = CASES[name], tensors(VALUES, name)
    grid = Grid(case["height"], case["width"], case["skip"])
    parameters = {key.removeprefix("param/"): value for key, value in t.items() if key.startswith("param/")}
    tables = {key: value for key, value in parameters.items() if key.startswith("rpe_")}
    linear = {key: parameters[key].clone().requires_grad_() for key in parameters.keys() - tables.keys()}
    encoding = build(case, grid, tables)
    x = t["input"].clone().requires_grad_()
    qkv = torch.nn.functional.linear(x, linear["qkv.weight"], linear["qkv.bias"])
    q, k, v = qkv.unflatten(-1, (3, case["heads"], -1)).permute(2, 0, 3, 1, 4)
    out = attention(q, k, v, grid, [encoding], backend=backend).transpose(1, 2).flatten(2)
    out = torch.nn.functional.linear(out, linear["proj.weight"], linear["proj.bias"])
    check(out, t["output"], "output")
    (out * t["weight"]).sum().backward()
    found = {"grad_input": x} | {"grad_param/" + key: value for key, value in linear.items()}
    found |= {"grad_param/" + key: encoding.get_parameter(our_name(key, "")) for key in tables}
    assert found.keys() == {key for key in t if key.startswith("grad")}
    for key, source in found.items():
        assert source.grad is not None
        check(source.grad, t[key], key)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", names(MODEL_CASES, "detr"))
def test_detr_encoder_attention(name: str, backend: str) -> None:
    case, t = MODEL_CASES[name], tensors(MODEL_VALUES, name)
    grid = Grid(case["height"], case["width"])
    state = {key.removeprefix("state/"): value for key, value in t.items() if key.startswith("state/")}
    encoding = build(case, grid, {key: value for key, value in state.items() if key.startswith("rpe_")})
    place, src = (t["src"] + t["pos"]).transpose(0, 1), t["src"].transpose(0, 1)
    q, k, v = (
        torch.nn.functional.linear(x, weight, bias).unflatten(-1, (case["num_heads"], -1)).transpose(1, 2)
        for x, weight, bias in zip(
            (place, place, src), state["in_proj_weight"].chunk(3), state["in_proj_bias"].chunk(3), strict=True
        )
    )
    may_attend = ~t["mask"].flatten(1)[:, None, None]
    assert not may_attend.all(), "the case is about padding"
    out = attention(q, k, v, grid, [encoding], mask=may_attend, backend=backend).transpose(1, 2).flatten(2)
    out = torch.nn.functional.linear(out, state["out_proj.weight"], state["out_proj.bias"])
    check(out.transpose(0, 1), t["output"], "output")


@pytest.mark.parametrize("name", names(MODEL_CASES, "buckets"))
def test_buckets(name: str) -> None:
    case = MODEL_CASES[name]
    method: Any = case["method"]
    part = {"rows": "_rows", "cols": "_columns"}.get(method, "")
    method = "cross" if part else method
    grid = Grid(case["height"], case["width"])
    buckets = Buckets(IRPE(8, 1, grid, method=method, ratio=case["ratio"]).mappings[part], grid, grid)
    assert buckets.count == case["num_buckets"]
    assert torch.equal(buckets.dense(), MODEL_VALUES[name].long())
