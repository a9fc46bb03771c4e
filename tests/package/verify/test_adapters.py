"""The case `adapters`: the files that it writes, the requests that it mixes, and the faults that it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.verify.__main__ import main
from millrace.verify.adapter_files import NoAdapters, linears, write_adapters
from millrace.verify.adapters import mixed
from millrace.verify.questions import COMPLETIONS, Question
from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.verify import FakeServer, fake_server

NAMES = ("one", "other")


def check(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    code = main([fake.url, "--json", "--cases=adapters", *flags])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return code, row


def test_adapters_that_keep_the_promise_are_green(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(adapters=NAMES) as fake:
        code, row = check(fake, capsys)
    assert (code, row["verdict"], row["requests"]) == (0, "equal", 12)
    assert row["note"] == "adapters changed 8 answers of the base"


def test_an_adapter_that_is_lost_in_company_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(adapters=NAMES, repeats_lose_adapters=True) as fake:
        code, row = check(fake, capsys)
    assert (code, row["verdict"], row["requests_equal"]) == (1, "broken", 4)


def test_an_adapter_without_effect_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(adapters=NAMES, ignores_adapters=True) as fake:
        code, row = check(fake, capsys)
    assert (code, row["verdict"]) == (1, "not_exercised")


def test_a_server_without_adapters_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as fake:
        _, row = check(fake, capsys)
    assert row["verdict"] == "not_checked"


def test_requests_name_the_base_and_each_adapter_in_turn() -> None:
    native = Question(text="x", input_ids=(1,), max_new_tokens=2, parameters={})
    completion = Question(
        text="x", input_ids=(1,), max_new_tokens=2, parameters={"temperature": 0}, route=COMPLETIONS
    )
    asked = mixed([native, native, completion, native], NAMES)
    assert [question.adapter for question in asked] == [None, "one", "other", None]
    assert "adapter_id" not in asked[0].body["parameters"]
    assert asked[1].body["parameters"]["adapter_id"] == "one"
    assert asked[2].body["model"] == "other"


def test_the_files_fit_the_demo_model(tmp_path: Path) -> None:
    shapes = linears(demo_folder())
    assert shapes["model.layers.3.mlp.down_proj"] == (256, 704)
    assert len(shapes) == 4 * 7
    folders = write_adapters(demo_folder(), tmp_path)
    wide, narrow = (
        load_file(str(folder / "adapter_model.safetensors")) for folder in folders.values()
    )
    assert (len(wide), len(narrow)) == (2 * 4 * 7, 2 * 4 * 2)
    a = wide["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"]
    assert (a.dtype, tuple(a.shape)) == (torch.bfloat16, (8, 256))
    assert 2**-5 <= a.abs().min() <= a.abs().max() < 2**-3
    assert 0.4 < (a > 0).float().mean() < 0.6
    config = json.loads((folders["verify-narrow"] / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (20, ["q_proj", "v_proj"])


def test_a_checkpoint_of_other_names_has_no_adapters(tmp_path: Path) -> None:
    save_file({"h.0.attn.c_attn.weight": torch.zeros(4, 12)}, str(tmp_path / "m.safetensors"))
    with pytest.raises(NoAdapters, match="known names"):
        write_adapters(tmp_path, tmp_path / "adapters")
