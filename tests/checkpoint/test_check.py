"""`sferic check` and `sferic convert`: what a user sees."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sferic
from sferic.cli import main


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = 0
    try:
        main(["check", str(folder), "--json"])
    except SystemExit as exit:
        code = int(exit.code or 0)
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def broken(published: Path, tmp_path: Path) -> Path:
    """A copy in one file, to break."""
    main(["convert", str(published), str(tmp_path / "model"), "--layout", "minimax"])
    return tmp_path / "model"


def test_a_good_folder(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = sferic.load(published)
    code, report = checked(published, capsys)
    assert code == 0
    assert report["problems"] == []
    assert report["layout"] == "minimax"
    parameters = sum(p.numel() for p in model.parameters())
    assert report["parameters"] == parameters
    assert report["weight_bytes"] == {"fp32": 4 * parameters, "bf16": 2 * parameters}
    assert report["layers"] == "7 lightning, 1 softmax"
    assert report["derived"] == 28
    assert report["tensors"] == 28 + 155
    assert report["files"] == len(list(published.glob("*.safetensors"))) > 1
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 16
    assert report["state_bytes_per_sequence"] == 7 * 8 * 16 * 16 * 4


def test_a_reader_gets_the_same(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(published)])
    out = capsys.readouterr().out
    for part in ("minimax", "28 of them decay tables", "7 lightning, 1 softmax", "would load"):
        assert part in out


def test_every_problem_is_listed(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(broken / "model.safetensors")
    names = sorted(weights)
    for name in names[:60]:
        del weights[name]
    weights["extra"] = torch.zeros(1)
    save_file(weights, broken / "model.safetensors")
    code, report = checked(broken, capsys)
    assert code == 1
    assert {f"missing {name}" for name in names[:60]} <= set(report["problems"])
    assert "unexpected extra" in report["problems"]
    with pytest.raises(SystemExit):
        main(["check", str(broken)])
    assert "won't load; problems: 61" in capsys.readouterr().out


def test_a_bad_config_and_bad_weights_are_both_told(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((broken / "config.json").read_text())
    del config["layernorm_mlp_alpha"]
    (broken / "config.json").write_text(json.dumps(config))
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    code, report = checked(broken, capsys)
    assert code == 1
    text = " ".join(report["problems"])
    assert "layernorm_mlp_alpha: missing" in text
    assert "model.safetensors is damaged" in text


@pytest.mark.parametrize("depth", [1, 100_000])
def test_a_check_tells_and_never_fails(
    broken: Path, capsys: pytest.CaptureFixture[str], depth: int
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (broken / name).write_text("[" * depth + "]" * depth)
    code, report = checked(broken, capsys)
    assert code == 1
    assert len(report["problems"]) == 2
    assert len(report["notes"]) == 1


def test_what_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(tmp_path / "nowhere", capsys)
    assert code == 1
    assert "is no folder here" in report["problems"][0]
    code, report = checked(tmp_path, capsys)
    assert code == 1
    assert len(report["problems"]) == 2


def test_a_tokenizer_of_another_model_is_noted(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sferic.data import Tokenizer

    text = ["some text to train on, and some more text"] * 9
    Tokenizer.train(text, 274).save(broken / "tokenizer.json")
    code, report = checked(broken, capsys)
    assert code == 0
    assert "274 entries for a vocabulary of 128" in report["notes"][0]


@pytest.mark.parametrize("layout", ["sferic", "minimax", "transformers"])
def test_convert_on_the_command_line(
    published: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--layout", layout, "--dtype", "bfloat16", "--shard-gb", "0.001"]
    main(["convert", str(published), str(out), *options])
    assert len(list(out.glob("*.safetensors"))) == 2
    expected = sferic.load(published, dtype=torch.bfloat16)
    found = sferic.load(out)
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)
    capsys.readouterr()
    code, report = checked(out, capsys)
    assert code == 0
    assert report["layout"] == layout


def test_convert_says_what_is_wrong(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["convert", str(published), str(tmp_path / "out"), "--layout", "gguf"])
    assert "gguf" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out"), "--layout", "minimax"])
    assert exit.value.code == 2
    assert "nowhere is not there" in capsys.readouterr().err
