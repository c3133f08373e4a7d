"""Pages, blocks and pictures from made-up files of figures; and the project's own, as they are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

import made_up
from fastconv.bench import results
from results import blocks, catalogue, figures, overview, pages
from results.blocks import BlockError
from results.figures import Figure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of made-up figures of an H200, with no page but its own."""
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "pages", list)
    made_up.write(tmp_path / "results" / "h200")
    return tmp_path / "results" / "h200"


def test_the_founding_block(folder: Path) -> None:
    made = blocks.block("founding", folder.parents[1] / "README.md")
    assert made is not None
    lines = made.splitlines()
    assert lines[1:6] == [
        "| workload | mode | forward | input gradient | weight gradient | training step |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| dilated5x9: 8x32x512x512, 64x32x5x9, dilation 2x3 | TF32 | 4.0x | 3.9x | 3.8x | 3.7x |",
        "|  | ieee | 3.6x | 3.5x | 3.4x | 3.3x |",
        "|  | bfloat16 NHWC | 3.2x | 3.1x | 3.0x | 2.90x |",
    ]
    lost = made[made.index("Slower") : made.index("NVIDIA")]
    assert "square3x3 step bfloat16 nhwc 0.50x, square3x3 weight_grad" in lost.replace("\n", " ")
    assert "dilated5x9" not in lost
    source = "NVIDIA H200, commit 0123456789, 2026-01-02 ([table](results/h200/layers.md))."
    assert lines[-2] == source
    assert max(map(len, lost.splitlines())) <= 100


def test_the_networks_block(folder: Path) -> None:
    made = blocks.block("networks", folder.parents[1] / "docs" / "networks.md")
    assert made is not None
    lines = made.splitlines()
    assert lines[1] == (
        "| network | images | training TF32 | training bfloat16 | inference TF32 "
        "| inference bfloat16 |"
    )
    assert lines[3:5] == [
        "| ResNet-50 | 64x3x224x224 | 1.21x | 1.15x | 2.39x | 3.0x |",
        "| U-Net | 64x3x224x224 | 0.95x | 2.00x | 1.50x | 1.00x |",
    ]
    assert "Geometric means: training 1.28x, inference 1.82x." in lines
    assert "Slower than PyTorch: unet training float32 tf32 nchw 0.95x." in lines
    assert "([table](../results/h200/networks.md))" in lines[-2]


COMPILED_LINES = [
    "| network | mode | calls | fastconv ms | PyTorch ms | speed-up | first step s |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    "| ResNet-50 | training, bfloat16 autocast nhwc | eager | 10 | 11.5 | 1.15x | 0.1 / 0.1 |",
    "|  |  | compiled | 8 | 6 | 0.75x | 0.1 / 0.1 |",
    "|  |  | compiled + CUDA graphs | failed | 5 |  | - / 0.1 |",
    "",
    "resnet50 training bfloat16 autocast nhwc, fastconv compiled + CUDA graphs: failed: no memory.",
    "",
    "Slower than PyTorch: resnet50 compiled training bfloat16 autocast nhwc 0.75x.",
]


def test_the_block_of_compiled_networks(folder: Path) -> None:
    made = blocks.block("compiled", folder.parents[1] / "docs" / "networks.md")
    assert made is not None
    assert made.splitlines()[1 : len(COMPILED_LINES) + 1] == COMPILED_LINES


def test_compiled_networks_have_a_table_of_their_own(folder: Path) -> None:
    eager, _, compiled = pages.made()[folder / "networks.md"].partition("## After")
    assert "compiled" not in eager
    assert "| resnet50 | training | bfloat16 autocast nhwc |" in eager
    assert compiled.splitlines()[4:] == COMPILED_LINES
    found = made_up.networks()
    found.rows = [replace(row, compiled=()) for row in found.rows]
    found.write(folder / "networks.json")
    assert pages.made()[folder / "networks.md"] == eager.rstrip("\n") + "\n"


def test_the_block_of_sums(folder: Path) -> None:
    made = blocks.block("models", folder.parents[1] / "README.md")
    assert made is not None
    assert made.splitlines()[1:4] == [
        "| network | mode | forward | input gradient | weight gradient |",
        "| --- | --- | ---: | ---: | ---: |",
        "| ResNet-50 | bfloat16 NHWC | 1.25x |  |  |",
    ]
    assert "Slower than PyTorch: none." in made


def test_blocks_of_layers(folder: Path) -> None:
    page = folder.parents[1] / "page.md"
    made = blocks.block("layers; resnet50_03 asym5x9; forward; bfloat16 nhwc", page)
    assert made is not None
    assert made.splitlines()[1:5] == [
        "| layer | forward |",
        "| --- | ---: |",
        "| 64 channels, 3x3, 56x56 | 500 µs, 1.25x, 50% m |",
        "| asym5x9 | 500 µs, 2.00x, 50% m |",
    ]
    made = blocks.block("layers; asym5x9; forward step; float32 tf32 nchw, bfloat16 nhwc", page)
    assert made is not None
    assert made.splitlines()[3:5] == [
        "| asym5x9, forward | 500 µs, 2.80x, 50% m | 500 µs, 2.00x, 50% m |",
        "| asym5x9, training step | 500 µs, 2.50x, 50% m | 500 µs, 1.70x, 50% m |",
    ]
    assert blocks.block("layers-ampere; asym5x9; forward; bfloat16 nhwc", page) is None
    for wrong in ("found", "layers; asym5x9; forwards; bfloat16 nhwc"):
        with pytest.raises(BlockError, match=wrong[-5:]):
            blocks.block(wrong, page)
    with pytest.raises(BlockError, match="no layer is called asym9x5"):
        blocks.block("layers; asym9x5; forward; bfloat16 nhwc", page)


def test_blocks_are_filled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(
        "before\n\n<!-- results: founding -->\nold\n<!-- end -->\n\nbetween\n"
        "<!-- results: layers-ampere; a; forward; bfloat16 nhwc -->\nkept\n<!-- end -->\n"
    )
    monkeypatch.setattr(figures, "pages", lambda: [page])
    text = pages.made()[page]
    assert text.startswith("before\n\n<!-- results: founding -->\n\n| workload |")
    assert text.endswith(
        "<!-- results: layers-ampere; a; forward; bfloat16 nhwc -->\nkept\n<!-- end -->\n"
    )
    assert "old" not in text
    page.write_text(text)
    assert pages.made()[page] == text


def test_blocks_wait_until_a_file_is_complete(folder: Path) -> None:
    page = folder.parents[1] / "README.md"
    found = made_up.layers()
    found.rows = [row for row in found.rows if row.case.workload.name == "dilated5x9"]
    found.write(folder / "layers.json")
    assert blocks.block("founding", page) is None
    assert blocks.block("layers; resnet50_03; forward; bfloat16 nhwc", page) is None
    assert "rows have not been measured" in pages.made()[folder / "layers.md"]


def test_pages_of_all_files(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    written = pages.write()
    texts = {path.name: path.read_text() for path in written}
    assert all(path.parent == folder for path in written if path.name != "README.md")
    assert {*texts} == {
        "layers.md", "networks.md", "host.md", "first-steps.md", "verify.md", "kernelbench.md",
        "README.md", "overview.svg", "founding-speedups.svg", "founding-roofline.svg",
        "networks-speedups.svg",
    }  # fmt: skip
    assert "## Founding workloads, float32 NCHW" in texts["layers.md"]
    assert "![founding-roofline](founding-roofline.svg)" in texts["layers.md"]
    assert "Slower than PyTorch: unet training float32 tf32 nchw 0.95x." in texts["networks.md"]
    assert "Slower than PyTorch: small_forward 2.00." in texts["host.md"]
    assert (
        "| ResNet-50 | 64 | 17.1 s | 9.0 s | 5.6 s | 0.6 s | 30 / 30 ms |"
        in texts["first-steps.md"]
    )
    assert "| family | hopper | 9 | 1 | 1.5 |" in texts["verify.md"]
    assert "**1 of 2 rows have not been measured.**" in texts["verify.md"]
    assert "- `fastconv verify --shape x`: off" in texts["verify.md"]
    assert (
        "| 62 | a (`--precision ieee`) | 5 of 5 | 2.000 | 1.000 | 2.00x |"
        in texts["kernelbench.md"]
    )
    assert "failed: no nvcc" in texts["kernelbench.md"]
    assert "Geometric mean: 1.00x. Slower than PyTorch: 87 0.50x." in texts["kernelbench.md"]
    assert "| 0123456789 | 2026-01-02 03:04 | 1 of 2 |" in texts["README.md"]
    assert not pages.stale()
    (folder / "host.md").write_text("by hand")
    assert pages.stale() == [folder / "host.md"]


def test_the_overview_has_a_bar_for_each_figure() -> None:
    root = ElementTree.fromstring(overview.svg(made_up.layers(), made_up.networks()))
    space = "{http://www.w3.org/2000/svg}"
    bars = [one for one in root.iter(f"{space}rect") if "key" not in one.get("class", "")]
    assert len(bars) == 8 + 36
    shown = [one.text or "" for one in root.iter(f"{space}text")]
    assert {"ResNet-50", "U-Net", "dilated5x9", "2.39x", "0.95x"} <= {*shown}
    assert "prefers-color-scheme: dark" in (root.findtext(f"{space}style") or "")
    right = max(float(bar.get("x", "0")) + float(bar.get("width", "0")) for bar in bars)
    assert right + overview.FIGURE_WIDTH <= overview.WIDTH + 1


def test_ratios_of_a_page() -> None:
    page = Path("page.md")
    text = (
        "3.8x and 12x, 8x32x512, x2, `9.9x`\n```\n9.9x\n```\n1.70 to 3.58 times, 17 times\n"
        "<!-- results: founding -->\n7.7x\n<!-- end -->\n| **0.93x** | 5.1x? |\n"
    )
    assert [(one.line, one.text) for one in figures.ratios(page, text)] == [
        (1, "3.8"), (1, "12"), (5, "1.70"), (5, "3.58"), (9, "0.93"), (9, "5.1"),
    ]  # fmt: skip


def test_ratios_that_were_not_measured(folder: Path) -> None:
    measured = figures.known(folder)
    page = Path("page.md")
    right = [Figure(page, 1, text) for text in ("4.0", "2.39", "2.4", "1.28", "4")]
    wrong = [Figure(page, 2, text) for text in ("4.1", "2.38", "12")]
    assert figures.unknown([*right, *wrong], measured) == wrong


# --- The project's own pages ----------------------------------------------------------------------


def test_pages_are_made_from_the_files_of_figures() -> None:
    """If this fails: `make results-pages`, and commit what it writes."""
    assert not pages.stale()


def test_blocks_ask_for_what_there_is() -> None:
    for page in figures.pages():
        for block in blocks.blocks(page):
            blocks.parsed(block.what)


def test_files_of_figures_are_of_clean_commits() -> None:
    for folder in catalogue.folders():
        for path in folder.glob("*.json"):
            contents = catalogue.read(path)
            assert contents is not None
            commit = contents["environment"]["commit"]
            assert "dirty" not in commit, path
            assert commit != "unknown", path
            assert {"sources", "rows", "effort"} <= contents["environment"].keys(), path
        for path in folder.glob("*.md"):
            assert "dirty" not in path.read_text(encoding="utf-8"), path


def test_figures_of_pages_were_measured() -> None:
    """All ratios of pages are in a file below docs/results, up to rounding."""
    found = [
        figure
        for page in figures.pages()
        for figure in figures.ratios(page, page.read_text(encoding="utf-8"))
    ]
    assert not figures.unknown(found, figures.known(catalogue.RESULTS))


def test_own_results_can_be_read() -> None:
    for path in catalogue.RESULTS.glob("*/layers*.json"):
        assert results.read(path).rows
