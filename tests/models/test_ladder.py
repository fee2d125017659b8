import pytest

from models.errors import UnknownModel
from models.formats import weight_bytes
from models.ladder import LADDER, OVERHEAD_BYTES, Rung, fits, rung
from models.spec import KV_ELEMENT_BYTES


@pytest.mark.parametrize("one", LADDER, ids=lambda one: one.spec.name)
def test_shape_has_the_published_number_of_parameters(one: Rung) -> None:
    assert one.spec.parameters == one.published_parameters
    assert one.source.startswith("https://")


def test_ladder_is_ordered_and_reaches_from_135m_to_70b() -> None:
    counts = [one.spec.parameters for one in LADDER]
    assert counts == sorted(counts)
    assert counts[0] == 134_515_008
    assert counts[-1] == 70_553_706_496


def test_names_and_aliases_are_unique_and_found_in_any_case() -> None:
    names = [name for one in LADDER for name in (one.spec.name, *one.aliases)]
    assert len(names) == len(set(names))
    for name in names:
        assert name in (rung(name.upper()).spec.name, *rung(name.upper()).aliases)
    assert {"135m", "360m", "0.5b", "1b", "3b", "8b", "70b"} <= set(names)


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        UnknownModel, match=r"'9b' is no rung.*smollm2-135m or 135m.*llama-3\.3-70b or 70b"
    ):
        rung("9b")


def test_fits_is_weights_plus_kv_plus_overhead() -> None:
    (fit,) = fits(10**12, "Q8_0", slots=3, context_tokens=100, kv_dtype="q8_0", rungs=[rung("1b")])
    per_token = 16 * 2 * 8 * 64 * KV_ELEMENT_BYTES["q8_0"]
    assert fit.kv_bytes == 3 * 100 * per_token
    assert fit.total_bytes == weight_bytes(rung("1b").spec, "Q8_0") + fit.kv_bytes + OVERHEAD_BYTES


def test_fits_is_exact_at_its_edge() -> None:
    (fit,) = fits(0, rungs=[rung("8b")])
    assert not fit.fits
    assert fits(fit.total_bytes, rungs=[rung("8b")])[0].fits
    assert not fits(fit.total_bytes - 1, rungs=[rung("8b")])[0].fits


def test_kv_bytes_of_published_models() -> None:
    # Llama-3.1-8B: 32 layers x 2 x 8 heads x 128 x 2 bytes.
    assert rung("8b").spec.kv_bytes_per_token() == 131_072
    assert rung("qwen2.5-7b").spec.kv_bytes_per_token() == 57_344


def test_unknown_format_is_named() -> None:
    with pytest.raises(KeyError, match="Q9"):
        fits(1, "Q9")
