"""What is wrong with a checkpoint is said by file and field, and what is merely odd in a warning."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from greenroom import ConfigError, Omni
from greenroom.cli import app
from greenroom.loading import CheckpointError, load_checkpoint

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(checkpoints: Any, tmp_path: Path) -> Path:
    """The demo's."""
    return Path(shutil.copytree(checkpoints["demo"], tmp_path / "copy"))


def rewritten(file: Path, **words: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **words}))


def test_what_is_left_out_is_told_in_one_warning(copy: Path) -> None:
    rewritten(copy / "transformer/config.json", num_layers=1)
    with pytest.warns(UserWarning, match="left out") as told:
        (line,) = [c for c in load_checkpoint(copy).report.components if c.name == "transformer"]
    assert len(told) == 1 and len(line.unexpected) > 3
    text = str(told[0].message)
    assert text.startswith(f"{copy / TRANSFORMER}: FluxTransformer2DModel") and "config.json" in text
    assert f"{len(line.unexpected)} of the tensors" in text
    assert all((key in text) == (i < 3) for i, key in enumerate(line.unexpected[:4]))


@pytest.mark.parametrize("count", [0, -1])
def test_a_model_without_its_blocks_is_refused_by_the_field(copy: Path, count: int) -> None:
    rewritten(copy / "transformer/config.json", num_layers=count)
    with pytest.raises(CheckpointError, match=f"num_layers = {count} gives .* no transformer_blocks") as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(copy / "transformer/config.json")


def test_a_text_encoder_without_its_blocks_is_refused_by_the_field(copy: Path) -> None:
    rewritten(copy / "text_encoder/config.json", num_hidden_layers=0)
    with pytest.raises(CheckpointError, match="num_hidden_layers = 0 gives CLIPTextModel no "):
        load_checkpoint(copy)


@pytest.mark.parametrize("model", ["demo", "wan22_t2v", "qwen_image", "sd3", "flux2", "sdxl"])
def test_a_checkpoint_that_fits_warns_of_nothing(checkpoints: Any, model: str) -> None:
    folder = checkpoints[model]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2", "scheduler", "vae", "text_encoder"])
def test_a_missing_folder_is_named(copy: Path, name: str) -> None:
    shutil.rmtree(copy / name)
    with pytest.raises(CheckpointError, match=r"is missing, and model_index\.json lists it") as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(copy / name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tokenizer", r"holds no vocabulary of a CLIPTokenizer \(.*tokenizer\.json"),
        ("tokenizer_2", "holds no vocabulary of a T5Tokenizer"),
        ("scheduler", "could not be loaded as FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_a_folder_without_its_files_is_named(copy: Path, name: str, told: str) -> None:
    for file in (*(copy / name).glob("tokenizer.json"), *(copy / name).glob("scheduler*")):
        file.unlink()
    with pytest.raises(CheckpointError, match=told) as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(copy / name)


@pytest.mark.parametrize("value", ["x", [], ["diffusers"], [1, 2], None])
def test_an_entry_of_the_index_that_names_no_class_is_refused(copy: Path, value: Any) -> None:
    rewritten(copy / "model_index.json", transformer=value)
    with pytest.raises(CheckpointError, match=r"transformer = .* is not accepted; accepted: \[.library., .Class.\]"):
        load_checkpoint(copy)


@pytest.mark.parametrize("name", ["transformer", "scheduler", "tokenizer", "vae"])
def test_a_model_without_a_component_that_it_needs_generates_nothing(copy: Path, name: str) -> None:
    rewritten(copy / "model_index.json", **{name: [None, None]})
    with pytest.raises(ConfigError, match=f"accepted: a pipeline with all that FluxPipeline needs .*{name}"):
        Omni(copy, device="cpu")


@pytest.mark.parametrize("name", ["text_encoder", "transformer"])
def test_a_missing_config_is_named(copy: Path, name: str) -> None:
    (copy / name / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json") as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(copy / name)


def _link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere/blob")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(("change", "told"), [(_link, "is a link to /nowhere/blob"), (_folder, "is not a file")])
def test_weights_that_are_no_file_are_named(copy: Path, change: Callable[[Path], None], told: str) -> None:
    change(copy / TRANSFORMER)
    with pytest.raises(CheckpointError, match=told) as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(copy / TRANSFORMER)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"call": {"height": "x"}}', "call.height = 'x' is not accepted; accepted: a whole number"),
        ('{"call": {"num_inference_steps": 0}}', "call.num_inference_steps = 0 is not accepted"),
        ('{"call": {"foo": 1}}', "call.foo = 1: no parameter of the pipeline; these are: prompt, "),
        ('{"call": 5}', "call = 5 is not accepted; accepted: a mapping"),
        ('{"cal": {}}', 'has the field "cal"; accepted: "call"'),
        ("[]", "is not readable"),
        ("{", "is not readable"),
    ],
)
def test_a_wrong_recommendation_is_told_by_its_field(copy: Path, text: str, told: str) -> None:
    (copy / "greenroom.json").write_text(text)
    for words in (["plan"], ["generate", "--prompt", "a seven", "--device", "cpu", "-o", str(copy / "x.png")]):
        run = CliRunner().invoke(app, [words[0], str(copy), *words[1:]])
        assert run.exit_code == 2 and isinstance(run.exception, SystemExit), run.exception
        assert f"error: {copy / 'greenroom.json'}: {told}" in run.output
