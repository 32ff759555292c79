"""A model as a folder."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sferic
from sferic.checkpoint import read_config
from sferic.config import ConfigError, ModelConfig
from sferic.data import Tokenizer
from sferic.nn import HybridModel
from sferic.nn.mixers import LightningMixer

MakeModel = Callable[..., HybridModel]
FILE = "model.safetensors"


def slopes(model: HybridModel) -> list[Tensor]:
    return [m.slopes for m in model.modules() if isinstance(m, LightningMixer)]


@pytest.fixture
def model(make_model: MakeModel) -> HybridModel:
    return make_model(dtype=torch.float32)


@pytest.fixture
def folder(model: HybridModel, tmp_path: Path) -> Path:
    sferic.save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit(
    make_model: MakeModel, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = make_model(dtype=dtype)
    sferic.save(model, tmp_path / "model")
    loaded = sferic.load(tmp_path / "model")
    assert loaded.config == model.config
    a, b = model.state_dict(), loaded.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype == dtype
        assert torch.equal(a[name], b[name])
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))


def test_a_loaded_model_is_ready_for_inference(folder: Path) -> None:
    loaded = sferic.load(str(folder))
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(p.is_meta for p in loaded.parameters())
    assert {s.device.type for s in slopes(loaded)} == {"cpu"}


def test_the_dtype_can_be_chosen_and_spares_the_decays(folder: Path, model: HybridModel) -> None:
    loaded = sferic.load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.norm.weight, model.norm.weight.bfloat16())
    for a, b in zip(slopes(loaded), slopes(model), strict=True):
        assert torch.equal(a, b)


def test_a_changed_config_is_kept(make_model: MakeModel, tmp_path: Path) -> None:
    config = make_model().config.model_copy(update={"rope_base": 123.0, "init_gain": 0.5})
    sferic.save(HybridModel(config), tmp_path / "model")
    assert sferic.load(tmp_path / "model").config == config == read_config(tmp_path / "model")


@pytest.fixture
def weights(folder: Path) -> dict[str, Tensor]:
    """The stored tensors, to change."""
    return load_file(folder / FILE)


def refused(folder: Path, weights: dict[str, Tensor]) -> str:
    save_file(weights, folder / FILE)
    with pytest.raises(ValueError, match="does not fit its config") as error:
        sferic.load(folder)
    return str(error.value)


def test_all_misfits_are_listed(folder: Path, weights: dict[str, Tensor]) -> None:
    del weights["norm.weight"], weights["layers.0.ffn.w2"]
    weights["layers.9.ffn.w2"] = torch.zeros(1)
    weights["embed_tokens.weight"] = torch.zeros(41, 24)
    message = refused(folder, weights)
    assert str(folder) in message
    for part in (
        "missing norm.weight",
        "missing layers.0.ffn.w2",
        "unexpected layers.9.ffn.w2",
        "embed_tokens.weight is [41, 24] where the config needs [40, 24]",
    ):
        assert part in message


def test_a_tensor_of_equal_size_and_other_shape_does_not_fit(
    folder: Path, weights: dict[str, Tensor]
) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].reshape(24, 40).contiguous()
    assert "lm_head.weight is [24, 40] where the config needs [40, 24]" in refused(folder, weights)


@pytest.mark.parametrize(
    ("name", "lack"), [("sferic.json", r"sferic\.json and no config\.json"), (FILE, "safetensors")]
)
def test_a_folder_that_is_no_model_says_what_it_lacks(folder: Path, name: str, lack: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no .*{lack}"):
        sferic.load(folder)
    with pytest.raises(ValueError, match="nowhere is not there"):
        sferic.load(folder.parent / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_config_is_named(folder: Path, content: bytes) -> None:
    (folder / "sferic.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"sferic\.json"):
        sferic.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 1000])
def test_a_damaged_weights_file_is_named(folder: Path, keep: int) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        sferic.load(folder)


def test_saving_again_replaces_weights_and_keeps_all_else(
    folder: Path, make_model: MakeModel
) -> None:
    (folder / "tokenizer.json").write_text("kept")
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.md").write_text("kept")
    sferic.save(make_model(seed=2), folder, shard_bytes=5000)
    other = make_model(seed=1)
    sferic.save(other, folder)
    names = [FILE, "notes", "sferic.json", "tokenizer.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert (folder / "notes" / "mine.md").read_text() == "kept"
    assert (folder / "tokenizer.json").read_text() == "kept"
    assert torch.equal(sferic.load(folder).norm.weight, other.norm.weight)


def test_what_a_death_while_saving_left_is_no_obstacle(folder: Path, model: HybridModel) -> None:
    left = folder.with_name("model.tmp")
    shutil.copytree(folder, left)
    with pytest.raises(ValueError, match="in the way"):  # of whatever it is
        sferic.save(model, folder)
    (left / ".writing").touch()
    sferic.save(model, folder)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    assert not (folder / ".writing").exists()


def test_two_writers_of_one_folder(folder: Path, model: HybridModel) -> None:
    other = folder.with_name("model.tmp")
    other.mkdir()
    with (other / ".writing").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing"):
            sferic.save(model, folder)


def test_saving_through_a_link(folder: Path, make_model: MakeModel) -> None:
    link = folder.with_name("link")
    link.symlink_to("model")
    for seed in (1, 2):
        sferic.save(make_model(seed=seed), link)
    assert link.is_symlink()
    assert torch.equal(sferic.load(folder).norm.weight, make_model(seed=2).float().norm.weight)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_death_while_saving_over_a_model_leaves_one_of_the_two(
    folder: Path, model: HybridModel, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch,
    renames: int,
) -> None:  # fmt: skip
    """Die at the first rename, of the old folder, or at the second, of the new one."""
    replace, done = os.replace, []

    def dying(source: Path, target: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(replace(source, target))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            sferic.save(make_model(seed=1), folder)
    assert torch.equal(sferic.load(folder).norm.weight, model.norm.weight)
    sferic.save(make_model(seed=1), folder)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_the_tokenizer_of_a_model_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        sferic.load_tokenizer(folder)
    made = Tokenizer.train(["some text to train on, and some more text"] * 9, 274)
    made.save(folder / "tokenizer.json")
    for path in (folder, folder / "tokenizer.json", str(folder)):
        assert sferic.load_tokenizer(path).hash == made.hash


def test_the_public_names_work_together(
    folder: Path, make_config: Callable[..., ModelConfig]
) -> None:
    assert set(sferic.__all__) == {"Engine", "generate", "load", "load_tokenizer", "ops", "save"}
    model = sferic.load(folder)
    assert model.config == make_config()
    ((first, second),) = sferic.generate(model, [1, 2, 3], max_new_tokens=2)
    assert model(torch.tensor([[1, 2, 3]])).argmax(-1)[0, -1] == first
    assert model(torch.tensor([[1, 2, 3, first]])).argmax(-1)[0, -1] == second
    (alone,) = sferic.Engine(model).generate([[1, 2, 3]], max_new_tokens=2)
    assert alone.token_ids == [first, second]
    assert callable(sferic.ops.lightning_attention)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sferic.nothing  # type: ignore[attr-defined]  # noqa: B018
