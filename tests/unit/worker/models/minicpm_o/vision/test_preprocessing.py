"""Image preprocessing: decoding, refusals, the slice grid and the cutting into patches."""

import math
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.vision.pixels import (
    MAX_PIXELS,
    MAX_SCANNED_PIXELS,
    decode_image,
    decode_planned,
)
from duplane.worker.models.minicpm_o.vision.preprocessing import (
    MAX_SCALED_AREAS,
    MAX_SLICES,
    ImageRules,
    plan_image,
    plan_sizes,
    prepare,
    slice_grid,
)
from duplane.worker.models.types import ImageError

pytestmark = pytest.mark.slow

RULES = ImageRules()
SIDES = st.integers(1, 6000)
SLICES = st.integers(1, MAX_SLICES)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png_of_size(width: int, height: int) -> bytes:
    """Build a PNG whose header states this size, but whose data is almost empty."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# Decoding


def test_a_png_is_decoded_exactly() -> None:
    image = noise(30, 20)
    assert np.array_equal(np.asarray(decode_image(encode(image))), np.asarray(image))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30}])
def test_a_jpeg_is_decoded(options: dict[str, Any]) -> None:
    decoded = decode_image(encode(Image.new("RGB", (30, 20), (200, 40, 90)), "JPEG", **options))
    assert (decoded.mode, decoded.size) == ("RGB", (30, 20))
    assert np.abs(np.asarray(decoded).astype(int) - (200, 40, 90)).max() < 12


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA"])
def test_every_png_mode_becomes_rgb(mode: str) -> None:
    white = Image.new("RGB", (9, 9), (255, 255, 255))
    source = white.convert("P").convert("PA") if mode == "PA" else white.convert(mode)
    kept = source.convert("RGBA") if mode == "PA" else source
    assert np.asarray(decode_image(encode(kept))).tolist() == np.asarray(white).tolist()


def test_cmyk_and_grey_jpegs_become_rgb() -> None:
    for mode in ("CMYK", "L"):
        decoded = decode_image(encode(Image.new(mode, (16, 16)), "JPEG"))
        assert (decoded.mode, decoded.size) == ("RGB", (16, 16))


def test_transparency_does_not_change_colours() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert decode_image(encode(clear)).getpixel((0, 0)) == (10, 20, 30)
    palette = Image.new("RGB", (4, 4), (255, 0, 0)).convert("P")
    for transparency in (0, bytes(256)):
        data = encode(palette, transparency=transparency)
        assert decode_image(data).getpixel((0, 0)) == palette.convert("RGB").getpixel((0, 0))


def test_sixteen_bits_of_grey_keep_their_upper_eight() -> None:
    levels = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    decoded = np.asarray(decode_image(encode(Image.fromarray(levels))))
    assert np.array_equal(decoded, np.repeat((levels >> 8)[..., None], 3, axis=2))


def test_exif_orientation_is_left_alone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encode(noise(40, 20), "JPEG", exif=exif)).size == (40, 20)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encode(frames[0], save_all=True, append_images=frames[1:])
    assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


# Bad input


def test_an_empty_image_is_refused() -> None:
    with pytest.raises(ImageError, match="is empty"):
        decode_image(b"")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP"])
def test_other_common_formats_are_decoded(kind: str) -> None:
    red = decode_image(encode(Image.new("RGB", (20, 10), "red"), kind))
    assert (red.mode, red.size) == ("RGB", (20, 10))
    assert np.abs(np.asarray(red, int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation_of_another_format_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    first = decode_image(encode(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert np.abs(np.asarray(first, int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("kind", ["TIFF", "ICO"])
def test_rare_formats_are_refused(kind: str) -> None:
    with pytest.raises(ImageError, match="no readable JPEG, PNG, WEBP, GIF or BMP"):
        decode_image(encode(noise(20, 20), kind))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_image_is_refused(kind: str) -> None:
    data = encode(noise(64, 64), kind)
    with pytest.raises(ImageError, match=r"^the image cannot be decoded$"):
        decode_image(data[: len(data) // 2])


@pytest.mark.parametrize("size", [(8192, 4097), (10000, 10000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_by_the_header_alone(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match=f"pixels, more than {MAX_PIXELS}|more than {MAX_PIXELS}"):
        decode_image(png_of_size(*size))


@pytest.mark.parametrize("size", [(1, 1 << 24), (1 << 23, 1), (8, 1 << 20)])
def test_a_strip_is_refused_by_the_header_alone(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("pixels are decoded"))
    for judge in (plan_image, prepare):
        with pytest.raises(ImageError, match="too large or too narrow"):
            judge(RULES, png_of_size(*size), 1)


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 9))
def test_an_image_is_planned_like_the_picture_that_it_contains(
    width: int, height: int, allowed: int
) -> None:
    image = noise(width, height)
    planned = plan_image(RULES, encode(image), allowed)
    assert (planned.size, planned.pixels, planned.scans) == (image.size, width * height, 1)
    assert planned.plan == plan_sizes(RULES, image.size, allowed)


def test_a_picture_of_another_size_than_its_header_states_is_refused() -> None:
    planned = plan_image(RULES, encode(noise(40, 30)), 1)
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode_planned(replace(planned, data=encode(noise(30, 40))))


@pytest.mark.parametrize("size", [(0, 10), (10, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError):
        prepare(RULES, png_of_size(*size), 1)


def test_a_jpeg_with_endless_scans_is_refused_before_it_is_decoded() -> None:
    side = 1024
    data = encode(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    assert decode_image(data).size == (side, side)
    scans = b"\xff\xda\x00\x02" * (MAX_SCANNED_PIXELS // side**2)
    with pytest.raises(ImageError, match="scans of 1024 x 1024 pixels"):
        decode_image(data[:-2] + scans + data[-2:])


@pytest.mark.parametrize("count", [0, -1, MAX_SLICES + 1])
def test_a_number_of_slices_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ImageError, match="max_slices"):
        prepare(RULES, encode(noise(20, 20)), count)


@pytest.mark.parametrize("size", [(200_000, 1), (1, 200_000)])
def test_a_strip_is_refused_before_it_is_scaled(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="too narrow"):
        prepare(RULES, encode(Image.new("RGB", size)), 1)


WHOLE = [
    encode(noise(40, 30)),
    encode(noise(40, 30).convert("P"), transparency=bytes(256)),
    encode(noise(40, 30), "JPEG", dpi=(72, 72)),
    encode(noise(40, 30), "JPEG", progressive=True),
]


def test_the_images_of_the_next_test_can_be_decoded() -> None:
    assert [decode_image(data).size for data in WHOLE] == [(40, 30)] * len(WHOLE)


@given(
    st.sampled_from(WHOLE),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=30),
)
def test_broken_bytes_are_decoded_or_refused_but_never_crash(
    data: bytes, changes: list[tuple[int, int]]
) -> None:
    broken = bytearray(data)
    for offset, value in changes:
        broken[offset % len(broken)] = value
    with suppress(ImageError):
        assert prepare(RULES, bytes(broken), 2).tiles


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"]))
def test_noise_is_refused(data: bytes, start: bytes) -> None:
    with pytest.raises(ImageError):
        decode_image(start + data)


# Sizes


@given(SIDES, SIDES, SLICES)
def test_a_grid_has_at_least_two_slices_and_at_most_the_allowed_number(
    width: int, height: int, allowed: int
) -> None:
    grid = slice_grid(RULES, (width, height), allowed)
    areas = width * height / RULES.scale_resolution**2
    if grid is None:
        assert allowed == 1 or areas <= 1
    else:
        assert 2 <= math.prod(grid) <= allowed
        assert abs(math.prod(grid) - min(math.ceil(areas), allowed)) <= 1


@given(SIDES, SIDES, SLICES)
def test_no_other_grid_with_as_many_slices_is_nearer_to_the_shape_of_the_image(
    width: int, height: int, allowed: int
) -> None:
    grid = slice_grid(RULES, (width, height), allowed)
    if grid is None:
        return
    shape, count = math.log(width / height), math.prod(grid)
    chosen = abs(shape - math.log(grid[0] / grid[1]))
    for columns in range(1, count + 1):
        if count % columns == 0:
            other = math.log(columns / (count // columns))
            assert chosen <= abs(shape - other)


@given(SIDES, SIDES, SLICES, st.sampled_from([14, 16]), st.sampled_from([224, 448]))
def test_all_tiles_are_whole_patches_of_a_bounded_area(
    width: int, height: int, allowed: int, patch: int, scale: int
) -> None:
    rules = ImageRules(patch_size=patch, scale_resolution=scale)
    plan = plan_sizes(rules, (width, height), allowed)
    columns, rows = plan.grid or (1, 1)
    slice_size = plan.refined[0] / columns, plan.refined[1] / rows
    for side in (*plan.source, *slice_size):
        assert side % patch == 0
    bound = MAX_SCALED_AREAS * scale**2
    assert 0 < math.prod(plan.source) <= bound
    assert math.prod(slice_size) <= bound
    assert (plan.grid is None) == (plan.refined == (0, 0))


@given(st.integers(200, 4000), st.floats(0.25, 4.0))
def test_an_image_of_usual_shape_keeps_its_shape_and_gets_the_configured_area(
    width: int, shape: float
) -> None:
    height = round(width / shape)
    source = plan_sizes(RULES, (width, height), 1).source
    assert math.prod(source) == pytest.approx(RULES.scale_resolution**2, rel=0.1)
    assert source[0] / source[1] == pytest.approx(width / height, rel=0.1)


# Tiles


def test_the_whole_image_comes_first_and_its_slices_row_by_row() -> None:
    colours = [(10 * index, 100, 250 - 10 * index) for index in range(6)]
    tiles = Image.new("RGB", (1344, 896))
    for index, colour in enumerate(colours):
        corner = (448 * (index % 3), 448 * (index // 3))
        tiles.paste(Image.new("RGB", (448, 448), colour), corner)
    image = prepare(RULES, encode(tiles), 6)
    assert image.grid == (3, 2)
    assert image.size == (1344, 896)
    slices = [tile.patches.reshape(-1, 3, 196) for tile in image.tiles[1:]]
    assert [tuple(np.median(tile, axis=(0, 2))) for tile in slices] == colours


def test_a_patch_holds_its_pixels_channel_by_channel() -> None:
    image = noise(448, 448)
    (tile,) = prepare(RULES, encode(image), 1).tiles
    assert (tile.rows, tile.columns) == (32, 32)
    pixels = np.asarray(image)
    patch = pixels[2 * 14 : 3 * 14, 5 * 14 : 6 * 14].transpose(2, 0, 1)
    assert np.array_equal(tile.patches[2 * 32 + 5], patch.ravel())


def test_scaling_is_bicubic() -> None:
    image = noise(300, 200)
    (tile,) = prepare(RULES, encode(image), 1).tiles
    size = tile.columns * 14, tile.rows * 14
    scaled = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    assert np.array_equal(tile.patches[0], scaled[:14, :14].transpose(2, 0, 1).ravel())


def test_the_default_limit_of_slices_is_that_of_the_checkpoint() -> None:
    data = encode(noise(1000, 1000))
    assert prepare(ImageRules(max_slices=4), data).grid == (2, 2)
    assert prepare(ImageRules(max_slices=1), data).grid is None


def test_a_checkpoint_may_disable_scaling() -> None:
    rules = ImageRules(is_scaled=False)
    image = noise(100, 50)
    prepared = prepare(rules, encode(image), 9)
    (tile,) = prepared.tiles
    assert (tile.rows, tile.columns, prepared.grid) == (3, 7, None)
    first = np.asarray(image)[:14, :14].transpose(2, 0, 1)
    assert np.array_equal(tile.patches[0], first.ravel())
    for width, height in ((13, 50), (4000, 4000)):
        with pytest.raises(ImageError, match="too large or too narrow"):
            prepare(rules, encode(Image.new("RGB", (width, height))), 1)


# Rules


def test_rules_are_read_from_the_preprocessor() -> None:
    config = {
        "patch_size": 16,
        "scale_resolution": 320,
        "max_slice_nums": 4,
        "slice_mode": False,
        "norm_mean": [0.1, 0, 1],
        "norm_std": [0.2, 1, 2],
    }
    assert ImageRules.from_json({}) == ImageRules()
    rules = ImageRules.from_json(config)
    assert rules == ImageRules(16, 320, 4, False, (0.1, 0.0, 1.0), (0.2, 1.0, 2.0))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"patch_size": 0}, "patch_size"),
        ({"scale_resolution": 13}, "scale_resolution"),
        ({"max_slice_nums": 0}, "max_slice_nums"),
        ({"norm_mean": [0.5, 0.5]}, "norm_mean"),
        ({"norm_std": [0.5, 0.5, "x"]}, "norm_std"),
        ({"norm_std": [0.5, 0.0, 0.5]}, "norm_std"),
        ({"slice_mode": 1}, "slice_mode"),
    ],
)
def test_bad_rules_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        ImageRules.from_json(config)
