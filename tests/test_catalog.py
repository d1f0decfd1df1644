"""Text to encodings and back."""

import functools
import importlib
from typing import Any

import pytest
import torch

from whereformer import Grid, InputError, parse
from whereformer.catalog import CATALOG, FAMILIES, MODULES, options, spell
from whereformer.encoding import PositionEncoding
from whereformer.encodings import IRPE, PEG, Learned

TEXTS = [
    *CATALOG,
    "irpe(on='qkv')",
    "irpe(ratio=2.5, method='cross', shared=False, alpha=None)",
    "peg(after=(0, 1, 2, 3, 4))",
    "sincos2d(layout='big_vision', temperature=20.0)",
    "learned(prefix_rows=False, std=0.5)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_spelled_is_what_was_parsed(text: str) -> None:
    (factory,) = parse(text)
    assert spell(factory) == text


def test_parse_gives_one_factory_per_term() -> None:
    factories = parse("  learned+irpe( method = 'product',\n on = \"qkv\" ) + peg(after=[0, 1])")
    assert [factory.func for factory in factories] == [Learned, IRPE, PEG]
    assert [factory.keywords for factory in factories] == [
        {},
        {"method": "product", "on": "qkv"},
        {"after": [0, 1]},
    ]
    encoding = factories[1](24, 3, Grid(4, 5, prefix=1))
    assert isinstance(encoding, IRPE)
    assert (encoding.dim, encoding.num_heads, encoding.grid, encoding.on) == (24, 3, Grid(4, 5, prefix=1), "qkv")


@pytest.mark.parametrize(
    ("old", "keywords"),
    [
        (
            "rpe-2.0-product-ctx-1-k",
            {"ratio": 2.0, "method": "product", "mode": "contextual", "shared": True, "on": "k"},
        ),
        (
            "rpe-1.9-product-ctx-1-qkv",
            {"ratio": 1.9, "method": "product", "mode": "contextual", "shared": True, "on": "qkv"},
        ),
        ("rpe-20-euc-bias-0-k", {"ratio": 20, "method": "euc", "mode": "bias", "shared": False, "on": "k"}),
        ("rpe-33-quant-bias-0-qk", {"ratio": 33, "method": "quant", "mode": "bias", "shared": False, "on": "qk"}),
        (
            "rpe-20-cross-ctx-0-v",
            {"ratio": 20, "method": "cross", "mode": "contextual", "shared": False, "on": "v"},
        ),
    ],
)
def test_old_names(old: str, keywords: dict[str, Any]) -> None:
    (factory,) = parse(old)
    assert factory.func is IRPE
    assert factory.keywords == keywords
    factory(24, 3, Grid(4, 4, prefix=1))


def test_old_names_take_part_in_sums() -> None:
    learned, irpe = parse("learned + rpe-1.9-product-ctx-1-k")
    assert (learned.func, irpe.func) == (Learned, IRPE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read.*Expected names joined by"),
        ("learned +", "cannot be read"),
        ("learned + + irpe", "is not a name with keyword options"),
        ("learned - irpe", "'learned - irpe' is not a name with keyword options"),
        ("irpe('product')", "is not a name with keyword options"),
        ("irpe(**{})", "is not a name with keyword options"),
        ("whereformer.irpe", "'whereformer.irpe' is not a name"),
        ("irpe()()", "is not a name"),
        ("1", "'1' is not a name"),
        ("ipre", r"unknown encoding 'ipre' \(did you mean 'irpe'\?\), expected one of .*'irpe', .*'learned'"),
        ("pape", "'pape' is an attention module of its own, not an encoding: see whereformer.layers.PaPE"),
        ("zzz", "unknown encoding 'zzz', expected one of"),
        ("irpe(methods='product')", r"irpe has no option 'methods', expected one of .*'method'"),
        ("irpe(dim=3)", "irpe has no option 'dim'"),
        ("none(on='k')", r"none has no option 'on', expected one of \[\]"),
        ("irpe(method=product)", r"irpe: method=product is not a literal \(text needs quotes\)"),
        ("irpe(method=exit())", r"method=exit\(\) is not a literal"),
        ("irpe(shared='no')", "irpe: shared='no', expected True or False"),
        ("learned(prefix_rows=0)", "learned: prefix_rows=0, expected True or False"),
        ("rpe-2.0-product-ctx-2-k", "cannot be read|is not a name"),
        ("rpe-2.0-prod-ctx-1-k", "is not a name"),
        ("irpe\0", "cannot be read"),
        ("learned + " * 3000 + "learned", "cannot be read"),
        ("irpe(ratio=2, ratio=3)", "irpe: ratio is given twice"),
        ("irpe(on={[]: 1})", "is not a literal"),
    ],
)
def test_texts_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)


@pytest.mark.parametrize("text", [None, 3, ["irpe"], b"irpe"])
def test_what_is_no_text(text: Any) -> None:
    with pytest.raises(InputError, match="expected a text such as"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("irpe(method='prod')", "method='prod', expected one of .*'product'"),
        ("irpe(method=3)", "method=3, expected one of"),
        ("irpe(method=['product'])", r"method=\['product'\], expected one of"),
        ("irpe(mode='context')", "mode='context'"),
        ("irpe(index='clipped')", "index='clipped'"),
        ("irpe(quant='ranks')", "quant='ranks'"),
        ("irpe(on='')", "on=''"),
        ("irpe(on='kk')", "on='kk'"),
        ("irpe(on='kx')", "on='kx'"),
        ("irpe(on=1)", "on=1"),
        ("irpe(on='kv', mode='bias')", "on='kv' with mode='bias', which has no value side"),
        ("irpe(ratio=0)", "ratio=0"),
        ("irpe(ratio='2')", "ratio='2'"),
        ("irpe(ratio=5000)", "at most 1,000,000"),
        ("irpe(ratio=0.4)", "beta of at least 1"),
        ("irpe(alpha=5, beta=4)", "alpha <= beta"),
        ("irpe(index='clip', beta=0.5)", "beta=0.5"),
        ("irpe(index='clip', alpha=2)", "alpha=2, gamma=None with index='clip', which has beta alone"),
        ("irpe(beta='3')", "beta='3'"),
        ("sincos2d(temperature='hot')", "temperature='hot'"),
        ("peg(after='0')", "after='0'"),
        ("peg(after=None)", "after=None"),
        ("learned(std='x')", "std='x'"),
        ("learned(std=-0.5)", "std=-0.5, expected a positive number"),
    ],
)
def test_values_that_an_encoding_refuses(text: str, message: str) -> None:
    (factory,) = parse(text)
    with pytest.raises(InputError, match=message):
        factory(24, 3, Grid(4, 4))


def test_spell_names_what_the_catalog_does_not_hold() -> None:
    class Mine(PositionEncoding):
        pass

    assert spell(Mine) == "Mine"
    assert spell(functools.partial(IRPE, on="v")) == "irpe(on='v')"
    assert spell(lambda dim, num_heads, grid: IRPE(dim, num_heads, grid)) == "<lambda>"


def test_families_hold_the_whole_catalog() -> None:
    names = [name for family in FAMILIES.values() for name in family]
    assert names == list(CATALOG)
    assert len({*CATALOG.values()}) == len(CATALOG)


NAN, INF = float("nan"), float("inf")
NONSENSE = (object(), "nonsense", "", NAN, INF, [], (), {}, ("a", "b"), (NAN, NAN), b"x")


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, cls in CATALOG.items() for option in options(cls)]
)
def test_options_refuse_nonsense_by_name(name: str, option: str) -> None:
    default = options(CATALOG[name])[option]
    more = (1, 0, None) if isinstance(default, bool) else (True,)
    negative = () if option in ("offset", "grid_offset") else (-1.0,)
    for value in (*NONSENSE, *more, *negative):
        with pytest.raises(InputError, match=option):
            CATALOG[name](24, 3, Grid(3, 4, 1), **{option: value})


def test_attention_modules_are_where_the_catalog_says() -> None:
    for path in MODULES.values():
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), torch.nn.Module)
