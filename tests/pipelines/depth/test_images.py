"""Images in every form a user may bring; oracle: diffusers' MarigoldImageProcessor."""

import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.pipelines.marigold.marigold_image_processing import MarigoldImageProcessor
from PIL import Image, ImageOps

from marigold_uq.picture_files import ImageError, list_images, read_array
from marigold_uq.pipelines.depth import images
from marigold_uq.pipelines.depth.images import (
    RESAMPLE_METHODS,
    load_images,
    pad_to_multiple,
    picture_for_model,
    resize,
    resize_to_max_edge,
    to_model_input,
    to_uint8,
    unpad,
)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)  # (H, W, 3), odd sizes


def load_one(image, **kwargs) -> torch.Tensor:
    (tensor,) = load_images(image, **kwargs)
    assert tensor.dtype == torch.float32
    assert tensor.shape[0] == 3
    assert 0.0 <= tensor.min() <= tensor.max() <= 1.0
    return tensor


def expected_from(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_every_carrier_of_the_same_pixels_gives_the_same_tensor(pixels, tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    expected = expected_from(pixels)
    chw = torch.from_numpy(pixels).permute(2, 0, 1)
    for image in (path, str(path), Image.fromarray(pixels), pixels, pixels[None], chw, chw[None], expected):
        torch.testing.assert_close(load_one(image), expected, rtol=0, atol=0)
    for image in (pixels / 255.0, expected.double(), pixels.astype(np.uint16) * 257, chw.to(torch.uint16) * 257):
        torch.testing.assert_close(load_one(image), expected, rtol=0, atol=1e-7)  # one float32 rounding


def test_unsigned_integers_are_divided_by_the_largest_value_of_their_type():
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        top = np.iinfo(dtype).max
        tensor = load_one(np.array([[0, top // 2, top]], dtype=dtype))
        torch.testing.assert_close(tensor[0, 0], torch.tensor([0.0, 0.5, 1.0]), rtol=0, atol=0.5 / 255)


def test_lists_may_mix_kinds_and_sizes_and_batches_are_split(pixels):
    images = load_images([pixels, Image.fromarray(pixels[:10]), torch.zeros(2, 1, 4, 6), [np.ones((5, 5))]])
    assert [tuple(image.shape) for image in images] == [(3, 37, 53), (3, 10, 53), (3, 4, 6), (3, 4, 6), (3, 5, 5)]


def test_generators_of_images_are_read(pixels):
    assert len(load_images(pixels for _ in range(3))) == 3


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 1), (2, 8, 9, 1)])
def test_grey_numpy_images_get_three_equal_channels(shape):
    grey = np.random.default_rng(1).random(shape, dtype=np.float32)
    for image in load_images(grey):
        assert image.shape == (3, 8, 9)
        assert torch.equal(image[0], image[1])
        assert torch.equal(image[0], image[2])


MODES = [
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
]


@pytest.mark.parametrize("mode", MODES)
def test_every_pil_mode_is_accepted(mode):
    assert load_one(Image.new(mode, (5, 4))).shape == (3, 4, 5)


def test_transparent_pixels_show_the_background_in_every_mode_that_has_them():
    """White by default; half transparent black over white is 1 - 128/255."""
    rgba = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    half = 1 - 128 / 255
    for image in (rgba, np.asarray(rgba), rgba.convert("LA"), torch.from_numpy(np.array(rgba)).permute(2, 0, 1)):
        assert load_one(image)[0, 0].tolist() == pytest.approx([1.0, half], abs=1e-6)
        assert load_one(image, background=0.0)[0, 0].tolist() == [0.0, 0.0]


def test_a_palette_is_looked_up_and_its_transparent_index_is_transparent(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert load_one(palette)[:, 0].T.tolist() == [[1, 0, 0], [0, 0, 1]]
    palette.save(tmp_path / "p.png", transparency=1)
    assert load_one(tmp_path / "p.png")[:, 0].T.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_sixteen_bit_files_keep_their_precision(tmp_path):
    values = np.array([[0, 1, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    for image in (tmp_path / "deep.png", Image.fromarray(values), Image.fromarray(values.astype(np.int32))):
        torch.testing.assert_close(load_one(image)[0], torch.from_numpy(values / 65535).float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(orientation, tmp_path):
    """A bright upper left quarter must come out upper left, whatever way the camera stored it."""
    upright = np.zeros((32, 48), dtype=np.uint8)
    upright[:16, :24] = 255
    # The stored picture is the inverse of the operation a viewer must apply (EXIF 2.3, tag 274).
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose members: FLIP_LEFT_RIGHT = 0, ...
    stored = Image.fromarray(upright)
    if orientation > 1:
        stored = stored.transpose(Image.Transpose(inverse[orientation]))
    exif = Image.Exif()
    exif[274] = orientation
    stored.save(tmp_path / "photo.png", exif=exif)
    for image in (tmp_path / "photo.png", Image.open(tmp_path / "photo.png")):
        assert torch.equal(load_one(image)[0], torch.from_numpy(upright / 255).float())


def test_the_callers_array_is_never_shared(pixels):
    floats = np.zeros((4, 4, 3), dtype=np.float32)
    tensor = torch.zeros(3, 4, 4)
    for image in load_images([floats, tensor]):
        image.add_(1.0)
    assert floats.max() == 0
    assert tensor.max() == 0


def test_all_black_and_one_pixel_are_images(tmp_path):
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    assert load_one(tmp_path / "dot.png").shape == (3, 1, 1)
    black = load_one(np.zeros((20, 30, 3), dtype=np.uint8))
    model_input, _ = to_model_input(black, resolution=16, multiple=8)
    torch.testing.assert_close(model_input, torch.full((1, 3, 16, 16), -1.0))  # 10 x 16, padded


def test_to_uint8_inverts_loading(pixels):
    assert np.array_equal(to_uint8(load_one(pixels)), pixels)


# --- the bad input table ----------------------------------------------------------------------------------------------


def png_bytes(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "message"), [("nothing", "empty"), ("text", "not an image"), ("half a png", "truncated")]
)
def test_files_that_are_no_images_are_named(kind, message, pixels, tmp_path):
    contents = {"nothing": b"", "text": b"this is a text, not a picture", "half a png": png_bytes(pixels)[:2000]}
    path = tmp_path / "bad.png"
    path.write_bytes(contents[kind])
    with pytest.raises(ImageError, match=message) as caught:
        load_images(path)
    assert str(path) in str(caught.value)


def test_a_truncated_file_opened_by_the_user_is_reported_too(pixels):
    with pytest.raises(ImageError, match=r"image\[1\] is damaged or truncated"):
        load_images([pixels, Image.open(io.BytesIO(png_bytes(pixels)[:2000]))])


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged TIFF tags
@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "TIFF", "GIF", "BMP"])
def test_damaged_files_raise_nothing_but_image_errors(suffix, pixels, tmp_path):
    """Random bytes are overwritten; what still decodes is fine, everything else must be an ImageError."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, suffix)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(30):
        damaged = np.frombuffer(buffer.getvalue(), dtype=np.uint8).copy()
        damaged[rng.integers(0, min(len(damaged), 120), 4)] = rng.integers(0, 256, 4)
        path = tmp_path / "damaged"
        path.write_bytes(damaged.tobytes())
        try:
            load_images(path)
        except ImageError:
            refused += 1
    assert refused > 0


def with_exif(pixels: np.ndarray, exif: bytes, path: Path) -> Path:
    Image.fromarray(pixels).save(path, "JPEG", exif=exif, quality=100, subsampling=0)
    return path


def exif_of_text_resolution(orientation: int) -> bytes:
    """EXIF of two entries, by hand: Orientation, and an XResolution that claims to be a text."""
    header = b"Exif\0\0II*\0" + struct.pack("<I", 8)
    entries = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0) + struct.pack("<HHI4s", 0x011A, 2, 4, b"abc\0")
    return header + struct.pack("<H", 2) + entries + struct.pack("<I", 0)


def test_damage_elsewhere_in_the_exif_does_not_hide_the_orientation(pixels, tmp_path):
    upright = load_one(with_exif(pixels, b"", tmp_path / "plain.jpg"))
    path = with_exif(pixels, exif_of_text_resolution(6), tmp_path / "damaged.jpg")
    with pytest.raises(TypeError), Image.open(path) as image:
        ImageOps.exif_transpose(image)
    torch.testing.assert_close(load_one(path), torch.rot90(upright, -1, (1, 2)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about corrupt EXIF
def test_exif_bytes_may_be_anything(pixels, tmp_path):
    rng, sizes = np.random.default_rng(4), set()
    for number in range(200):
        exif = bytearray(exif_of_text_resolution(1 + number % 8))
        for place in rng.integers(6, len(exif), 1 + number % 4):
            exif[place] = rng.integers(0, 256)
        sizes.add(tuple(load_one(with_exif(pixels, bytes(exif), tmp_path / "photo.jpg")).shape))
    assert sizes == {(3, 37, 53), (3, 53, 37)}


def claimed_size(width: int, height: int) -> bytes:
    """A GIF of a few bytes whose header says how large it is."""
    buffer = io.BytesIO()
    Image.new("L", (1, 1)).save(buffer, "GIF")
    content = bytearray(buffer.getvalue())
    content[6:10] = struct.pack("<HH", width, height)
    return bytes(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_above_the_limit_is_refused_by_its_header(tmp_path, pixels):
    path = tmp_path / "bomb.gif"
    path.write_bytes(claimed_size(13_000, 13_000))
    tracemalloc.start()
    with pytest.raises(ImageError, match=r"bomb\.gif has 13000 x 13000 = 169,000,000 pixels, more than the 67,108,864"):
        load_images(path)
    with pytest.raises(ImageError, match="13000 x 13000"):
        load_images(Image.open(path))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    assert load_one(tmp_path / "photo.png", max_pixels=37 * 53).shape == (3, 37, 53)
    with pytest.raises(ImageError, match=f"{37 * 53:,} pixels, more than the {37 * 53 - 1:,} allowed"):
        load_images(tmp_path / "photo.png", max_pixels=37 * 53 - 1)
    with pytest.raises(ValueError, match="max_pixels must be at least 1"):
        load_images(tmp_path / "photo.png", max_pixels=0)


def test_a_file_that_other_programs_would_open_is_no_image(tmp_path):
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    assert Image.open(path).format == "EPS"
    with pytest.raises(ImageError, match="not an image"):
        load_images(path)


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        load_images(tmp_path / "missing.png")
    with pytest.raises(IsADirectoryError, match="list_images"):
        load_images(tmp_path)
    with pytest.raises(ImageError, match="download"):
        load_images("https://example.org/photo.jpg")


BAD_VALUES = [
    (np.full((4, 4, 3), np.nan), "48 values that are NaN or infinite"),
    (torch.full((3, 4, 4), float("inf")), "NaN or infinite"),
    (np.full((4, 4, 3), 200.0), r"values from 200 to 200.*divide by 255"),
    (torch.linspace(-1, 1, 48).reshape(3, 4, 4), r"values from -1 to 1.*\(image \+ 1\) / 2"),
    (np.array([[0.5, 1.02]]), r"values from 0.5 to 1.02.*clip"),
    (np.zeros((4, 4, 3), dtype=np.int32), "int32.*unsigned"),
    (torch.zeros(3, 4, 4, dtype=torch.int64), "int64.*unsigned"),
    (np.zeros((4, 4, 3), dtype=bool), "bool"),
    (torch.zeros(3, 4, 4, dtype=torch.complex64), "complex64"),
    (Image.fromarray(np.array([[70000]], dtype=np.int32)), "mode 'I' with values from 70000"),
    (Image.fromarray(np.array([[3.5]], dtype=np.float32)), "values from 3.5"),
]


@pytest.mark.parametrize(("image", "message"), BAD_VALUES)
def test_wrong_values_are_refused_with_what_was_found(image, message):
    with pytest.raises(ImageError, match=message):
        load_images(image)


BAD_SHAPES = [
    (np.zeros((3, 20, 30)), r"\(3, 20, 30\).*channels first.*transpose\(1, 2, 0\)"),
    (np.zeros((2, 3, 20, 30)), r"channels first.*transpose\(0, 2, 3, 1\)"),
    (torch.zeros(20, 30, 3), r"\(20, 30, 3\).*channels last.*permute\(2, 0, 1\)"),
    (torch.zeros(2, 20, 30, 3), r"channels last.*permute\(0, 3, 1, 2\)"),
    (np.zeros((20, 30, 5)), "5 channels"),
    (torch.zeros(2, 20, 30), "2 channels"),
    (np.zeros(7), r"shape \(7,\)"),
    (torch.zeros(1, 1, 3, 4, 4), r"shape \(1, 1, 3, 4, 4\)"),
    (np.zeros((0, 5, 3)), "no pixels: height x width is 0 x 5"),
    (torch.zeros(3, 5, 0), "no pixels"),
    (Image.new("RGB", (0, 5)), "no pixels: width x height is 0 x 5"),
    (np.zeros((0, 4, 4, 3)), "empty"),
    ([], "empty"),
]


@pytest.mark.parametrize(("image", "message"), BAD_SHAPES)
def test_wrong_shapes_are_refused_with_the_way_out(image, message):
    with pytest.raises(ImageError, match=message):
        load_images(image)


@pytest.mark.parametrize("image", [None, 3, b"bytes", {"image": 1}, [[0, 1], [1, 0]]])
def test_other_types_are_refused(image):
    with pytest.raises(TypeError, match="give a path, a PIL image"):
        load_images(image)


def test_errors_in_a_list_name_the_item(pixels):
    with pytest.raises(ImageError, match=r"image\[1\]"):
        load_images([pixels, np.full((2, 2), 2.0)])


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_are_listed_in_natural_order_without_other_files(tmp_path):
    for name in ("frame10.png", "frame2.PNG", "frame1.jpg", "notes.txt", ".hidden.png", "sub/frame0.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in list_images(tmp_path)] == ["frame1.jpg", "frame2.PNG", "frame10.png"]
    assert len(list_images(tmp_path, recursive=True)) == 4
    twice = list_images([tmp_path / "frame10.png", str(tmp_path), tmp_path / "notes.txt"])
    assert [path.name for path in twice] == ["frame10.png", "frame1.jpg", "frame2.PNG", "notes.txt"]


def test_missing_paths_and_empty_folders_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_images([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match=r"no image found in .*\.png"):
        list_images(tmp_path)
    with pytest.raises(FileNotFoundError, match="empty list"):
        list_images([])


# --- size: equal to diffusers, bit for bit ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
@pytest.mark.parametrize("resolution", [0, 24, 53, 160])
@pytest.mark.parametrize("kind", ["pil", "grey pil", "uint8", "float", "torch"])
def test_model_input_equals_diffusers_bit_for_bit(kind, resolution, method, pixels):
    image = {
        "pil": Image.fromarray(pixels),
        "grey pil": Image.fromarray(pixels[..., 0]),
        "uint8": pixels,
        "float": pixels.astype(np.float32) / 300,
        "torch": torch.from_numpy(pixels).permute(2, 0, 1).contiguous(),
    }[kind]
    processor = MarigoldImageProcessor(vae_scale_factor=8)
    expected, expected_padding, _ = processor.preprocess(image, resolution, method)
    ours, padding = to_model_input(load_one(image), resolution=resolution, multiple=8, method=method)
    assert torch.equal(ours, expected)
    assert padding == expected_padding
    # The layout in memory decides how convolutions round, so it must agree as well.
    layouts = (torch.contiguous_format, torch.channels_last)
    assert [ours.is_contiguous(memory_format=layout) for layout in layouts] == [
        expected.is_contiguous(memory_format=layout) for layout in layouts
    ]


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
@pytest.mark.parametrize("antialias", [False, True])
def test_resize_equals_diffusers_for_every_number_of_axes(method, antialias):
    maps = torch.rand(2, 3, 20, 30, generator=torch.Generator().manual_seed(0))
    expected = MarigoldImageProcessor.resize_antialias(maps, (13, 41), method, is_aa=antialias)
    assert torch.equal(resize(maps, (13, 41), method, antialias=antialias), expected)
    assert torch.equal(resize(maps[0], (13, 41), method, antialias=antialias), expected[0])
    assert torch.equal(resize(maps[0, 0], (13, 41), method, antialias=antialias), expected[0, 0])
    assert torch.equal(resize(maps[None], (13, 41), method, antialias=antialias), expected[None])


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (8, 16), (37, 53)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unpad_undoes_padding_which_repeats_the_edge(size, dtype):
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(0)).to(dtype)
    padded, padding = pad_to_multiple(image, 8)
    assert padded.shape[-2] % 8 == padded.shape[-1] % 8 == 0
    assert torch.equal(unpad(padded, padding), image)
    assert torch.equal(padded[:, -1, -1], image[:, -1, -1])


@pytest.mark.parametrize("size", [(10, 20000), (20000, 10)])
def test_an_extreme_strip_keeps_one_pixel_and_comes_back_at_its_size(size):
    """diffusers refuses it, since 10 * 768 // 20000 is 0."""
    strip = load_one(np.zeros(size, dtype=np.uint8))
    resized = resize_to_max_edge(strip, 768)
    assert sorted(resized.shape[-2:]) == [1, 768]
    model_input, padding = to_model_input(strip, resolution=768, multiple=8)
    assert sorted(model_input.shape[-2:]) == [8, 768]
    assert resize(unpad(model_input, padding), size).shape == (1, 3, *size)


def test_one_pixel_reaches_the_network_and_comes_back():
    model_input, padding = to_model_input(torch.full((3, 1, 1), 0.25), resolution=768, multiple=8)
    assert model_input.shape == (1, 3, 768, 768)
    assert model_input.unique().tolist() == [-0.5]
    assert resize(unpad(model_input, padding), (1, 1)).shape == (1, 3, 1, 1)


def test_wrong_sizes_and_methods_are_refused():
    image = torch.zeros(3, 8, 8)
    with pytest.raises(ValueError, match="'lanczos'; choose one of nearest"):
        resize(image, (4, 4), "lanczos")
    with pytest.raises(ValueError, match="at least 1"):
        resize(image, (0, 4))
    with pytest.raises(ValueError, match="longer edge in pixels"):
        resize_to_max_edge(image, -5)
    with pytest.raises(ValueError, match="multiple must be at least 1"):
        pad_to_multiple(image, 0)
    with pytest.raises(ValueError, match="cannot remove padding"):
        unpad(image, (8, 0))
    with pytest.raises(ValueError, match="grey level"):
        load_images(image, background=2.0)


def test_the_type_of_a_path_does_not_matter(tmp_path, monkeypatch):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    assert len(load_images([Path("a.png"), "a.png"])) == 2


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
@pytest.mark.parametrize("size", [(61, 97), (97, 61), (200, 9)])
def test_a_large_picture_is_resized_in_bands_as_if_at_once(method, size, monkeypatch):
    array = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    monkeypatch.setattr(images, "_LARGE_PIXELS", 100)
    monkeypatch.setattr(images, "_BAND_PIXELS", 7 * size[1])
    options = {"resolution": 32, "multiple": 8, "method": method}
    picture, found = picture_for_model(array, "large", **options)
    (whole,) = load_images(array)
    expected, padding = to_model_input(whole.contiguous(), **options)
    assert picture is array
    assert (found.padding, found.size) == (padding, size)
    assert (found.pixels - expected).abs().max() < 1e-5


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "I;16"])
def test_a_picture_to_show_and_for_the_network_is_that_of_load_images(mode, tmp_path):
    picture = Image.new(mode, (20, 12), 40) if mode != "RGBA" else Image.new(mode, (20, 12), (200, 30, 10, 128))
    picture.save(tmp_path / "a.png")
    shown, found = picture_for_model(read_array(tmp_path / "a.png"), "a", resolution=16, multiple=8)
    (tensor,) = load_images(tmp_path / "a.png")
    assert np.array_equal(shown, to_uint8(tensor))
    assert torch.equal(found.pixels, to_model_input(tensor, resolution=16, multiple=8)[0])
