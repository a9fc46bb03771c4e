from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace_shard.commands.composition import with_folders
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.kernels.base import LayerCache, Linear
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models import description
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.interface import KVLayer
from millrace_shard.models.quantized import code_formats
from millrace_shard.models.rope import RopeOverride
from millrace_shard.models.rope_spec import LinearScaling
from millrace_shard.models.spec import ExpertsSpec
from millrace_shard.weights.json_object import read_json_object
from millrace_testing.models.models import (
    CONFIGS,
    CPU,
    VOCAB,
    assert_generates_as,
    edit_json,
    greedy,
    logprobs,
    prompt_of,
    read_driver,
    read_model,
    save_tiny,
)
from millrace_testing.quantized.linears import FORMATS


def test_info_follows_the_config(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=9)
    model = read_model(tmp_path)
    assert model.info.model_type == "mistral"
    assert model.info.vocab_size == VOCAB
    assert model.info.max_position_embeddings == 256
    assert model.info.eos_token_ids == (2,)
    assert model.info.window_size == 9
    assert model.geometry.layers == (KVLayer(2, 16, window=9),) * 2


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (5, 2, (5, 2)),
        ([5, 7, 5], 2, (5, 7, 2)),
        (None, 3, (3,)),
        (None, [3, 4], (3, 4)),
        (None, None, ()),
        ("absent", 3, (3,)),
    ],
)
def test_end_of_sequence_ids_are_those_of_the_generation_config_and_the_config(
    generation: object, config: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "qwen2")
    edit_json(tmp_path / "config.json", eos_token_id=config)
    if generation == "absent":
        (tmp_path / "generation_config.json").unlink()
    else:
        edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    assert read_model(tmp_path).info.eos_token_ids == expected


def test_a_tokenizer_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def read_file(path: Path) -> dict[str, Any] | None:
        read.append(path.name)
        return read_json_object(path)

    save_tiny(tmp_path, "qwen2")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    monkeypatch.setattr(description, "read_json_object", read_file)
    for end in (9, 11):
        added = {"added_tokens": [{"content": "<|end|>", "id": end}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(added))
        for _ in range(3):
            assert ModelDescription.read(tmp_path).eos_token_ids[-1] == end
    assert read.count("tokenizer.json") == 2


@pytest.mark.parametrize(
    ("tokenizer_config", "older", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, {}, (2, 9)),
        ({"eos_token": {"content": "<|im_end|>"}}, {}, (2, 9)),
        ({"eos_token": "</s>", "eot_token": "<turn|>"}, {}, (2, 11)),
        ({}, {"eos_token": "<|im_end|>"}, (2, 9)),
        ({"eos_token": "<|im_end|>"}, {"eos_token": "<turn|>"}, (2, 9)),
        ({"eos_token": "<|beyond|>", "eot_token": "missing"}, {}, (2,)),
        ({"eos_token": None}, {}, (2,)),
    ],
)
@pytest.mark.parametrize("model", ["BPE", "Unigram"])
def test_end_tokens_that_only_the_tokenizer_names_end_a_sequence(
    tokenizer_config: dict[str, Any],
    older: dict[str, Any],
    expected: tuple[int, ...],
    model: str,
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path, "qwen2")
    edit_json(tmp_path / "generation_config.json", eos_token_id=2)
    edit_json(tmp_path / "config.json", eos_token_id=2)
    tokens = ["a", "b", "</s>"]
    vocab: object = {text: id_ for id_, text in enumerate(tokens)}
    if model == "Unigram":
        vocab = [[text, -1.0] for text in tokens]
    added = {"<|im_end|>": 9, "<turn|>": 11, "<|beyond|>": VOCAB}
    files = {
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": older,
        "tokenizer.json": {
            "model": {"type": model, "vocab": vocab},
            "added_tokens": [{"content": text, "id": id_} for text, id_ in added.items()],
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert ModelDescription.read(tmp_path).eos_token_ids == expected


def test_the_assumed_end_of_a_family_is_no_end_beside_a_named_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelDescription.read(tmp_path).eos_token_ids == (2,)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    token = {"content": "<|im_end|>", "id": 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [token]}))
    assert ModelDescription.read(tmp_path).eos_token_ids == (9,)


def test_an_end_of_sequence_that_is_not_an_id_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edit_json(tmp_path / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ModelError, match="eos_token_id='</s>'"):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
@pytest.mark.parametrize("own", [None, {"rope_type": "linear", "factor": 7.0, "rope_theta": 5e3}])
def test_rope_override_equals_a_checkpoint_made_so(
    kind: str, own: dict[str, Any] | None, tmp_path: Path
) -> None:
    theta = {"rope_theta": 5e3}
    made_so = {"rope_type": kind, "factor": 2.0} | theta
    reference = save_tiny(tmp_path, "llama", max_position_embeddings=32, rope_parameters=made_so)
    edit_json(tmp_path / "config.json", rope_parameters=own or {"rope_type": "default"} | theta)
    driver = read_driver(tmp_path, rope_override=RopeOverride(kind, 2.0))
    assert driver.model.info.max_position_embeddings == 64
    prompt = prompt_of(30)
    assert_generates_as(reference, [prompt], driver.generate([prompt], 6))


@pytest.mark.parametrize(
    ("model_type", "override", "message"),
    [
        ("llama", ("yarn", 2.0), "'yarn' is not one of: linear, dynamic"),
        ("llama", ("linear", 0.5), "at least 1, not 0.5"),
        ("gpt2", ("linear", 2.0), "gpt2 has no rotary embedding"),
    ],
)
def test_rope_overrides_that_make_no_sense_are_refused(
    model_type: str, override: tuple[str, float], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=message):
        read_model(tmp_path, rope_override=RopeOverride(*override))


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("llama", {"vocab_size": 10**9}, "vocab_size=1000000000 is not supported; at most 4194304"),
        ("bloom", {"n_layer": 5 * 10**7}, "n_layer=50000000 is not supported; at most 4096"),
        ("dbrx", {"n_layers": 5 * 10**7}, "n_layers=50000000 is not supported; at most 4096"),
        (
            "gpt_neox",
            {"num_hidden_layers": 5 * 10**7},
            "num_hidden_layers=50000000 is not supported",
        ),
        ("deepseek_v2", {"kv_lora_rank": 10**9}, "kv_lora_rank=1000000000 is not supported"),
        ("ernie4_5_moe", {"moe_layer_end_index": [1]}, r"moe_layer_end_index=\[1\] must be"),
        ("hunyuan_v1_moe", {"moe_topk": {}}, r"moe_topk=\{\} must be one positive whole number"),
        ("hunyuan_v1_moe", {"num_experts": []}, r"num_experts=\[\] must be one positive"),
        ("gpt2", {"dtype": [1]}, "is not a valid gpt2 config"),
        ("gpt2", {"n_head": 0}, "n_head=0 must be a positive whole number"),
        ("gpt_neox", {"num_attention_heads": 0}, "num_attention_heads=0 must be a positive"),
        ("starcoder2", {"num_key_value_heads": "x"}, "num_key_value_heads='x' must be a positive"),
        ("phi", {"vocab_size": -1}, "vocab_size=-1 must be a positive whole number"),
        ("phi", {"pad_token_id": 10**9}, "Padding_idx must be within num_embeddings"),
    ],
)
def test_fields_that_no_layer_can_be_made_of_are_refused(
    model_type: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path)


def test_an_activation_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "dbrx")
    config = json.loads((tmp_path / "config.json").read_text())
    edit_json(tmp_path / "config.json", ffn_config=config["ffn_config"] | {"ffn_act_fn": "silu"})
    with pytest.raises(UnsupportedModel, match="ffn_act_fn='silu' must be an object with a name"):
        read_model(tmp_path)


def test_rope_override_reaches_the_transformers_backend(tmp_path: Path) -> None:
    made_so = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    reference = save_tiny(
        tmp_path, "starcoder2", max_position_embeddings=32, rope_parameters=made_so
    )
    edit_json(tmp_path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    prompt = prompt_of(30)
    driver = read_driver(tmp_path, rope_override=RopeOverride("dynamic", 2.0))
    run = driver.generate([prompt], 6)[0]
    assert run.ids[30:] == greedy(reference, prompt, 6)[0]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def overridden(folder: Path, **flags: Any) -> Path:
    texts: dict[str, Any] = {name: json.dumps(value) for name, value in flags.items()}
    config = ShardConfig(model_folder=folder, uds_path="s", **texts)
    return with_folders(config).model_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("flag", ["rope_scaling", "hf_overrides"])
@pytest.mark.parametrize("model_type", ["llama", "starcoder2"])
def test_scalings_of_flags_equal_a_checkpoint_made_so(
    model_type: str, flag: str, tmp_path: Path
) -> None:
    folder, theta = tmp_path / "model", {"rope_theta": 500.0}
    reference = save_tiny(
        folder, model_type, max_position_embeddings=64, rope_parameters=YARN | theta
    )
    edit_json(folder / "config.json", rope_parameters={"rope_type": "default"} | theta)
    value = YARN if flag == "rope_scaling" else {"rope_parameters": YARN}
    changed = overridden(folder, **{flag: value})
    assert changed == overridden(folder, **{flag: value})
    driver = read_driver(changed)
    assert driver.model.info.max_position_embeddings == 64
    prompt = prompt_of(50)
    assert_generates_as(reference, [prompt], driver.generate([prompt], 6))


@pytest.mark.usefixtures("cache")
def test_overrides_replace_fields_and_reach_into_the_text_model(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3_moe", num_experts_per_tok=1)
    edit_json(tmp_path / "config.json", num_experts_per_tok=2)
    prompt = prompt_of(20)
    driver = read_driver(overridden(tmp_path, hf_overrides={"num_experts_per_tok": 1}))
    assert_generates_as(reference, [prompt], driver.generate([prompt], 3))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": raw | {"rope_theta": 5e5}})
    )
    flags = {
        "hf_overrides": {"text_config": {"num_experts_per_tok": 1}},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    spec = ModelDescription.read(overridden(tmp_path, **flags)).spec
    assert spec is not None
    rope, experts = spec.layers[0].attention.rope, spec.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    assert experts.router.rule.top_k == 1
    assert rope is not None
    assert rope.scaling == LinearScaling(factor=2.0)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("model_type", "flags", "message"),
    [
        ("llama", {"hf_overrides": {"max_position_embedings": 9}}, "max_position_embedings is not"),
        ("opt", {"hf_overrides": {"max_position_embedings": 9}}, "max_position_embedings is not"),
        ("llama", {"hf_overrides": {"rope_scaling": 2}}, "rope_parameters=2 must be an object"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "no factor, or it is 0"),
        ("llama", {"rope_scaling": {"rope_type": "ntk"}}, "rope_type 'ntk' is not supported"),
        ("gemma3_text", {"rope_scaling": YARN}, "full_attention, sliding_attention"),
    ],
)
def test_overrides_without_effect_or_meaning_are_refused(
    model_type: str, flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=message):
        ModelDescription.read(overridden(tmp_path, **flags))


@pytest.mark.parametrize("flag", ["--rope-scaling", "--hf-overrides"])
@pytest.mark.parametrize("text", ["yarn", "[1]", "{", "[" * 100_000])
def test_overrides_that_are_not_objects_are_refused(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ShardConfig.from_args(["m", f"{flag}={text}"])
    assert "not an object in JSON" in capsys.readouterr().err


LEGACY: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 3.0},
    "dynamic": {"type": "dynamic", "factor": 3.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}


@pytest.mark.parametrize("kind", LEGACY)
def test_older_names_of_rope_settings_match_transformers(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 500.0} | LEGACY[kind]
    reference = save_tiny(
        tmp_path, "llama", rope_parameters={k: v for k, v in rope.items() if k != "type"}
    )
    edit_json(
        tmp_path / "config.json", rope_parameters=None, rope_theta=500.0, rope_scaling=LEGACY[kind]
    )
    prompt = prompt_of(30)
    assert_generates_as(reference, [prompt], read_driver(tmp_path).generate([prompt], 6))


def test_the_requested_dtype_is_computed_in(tmp_path: Path) -> None:
    for model_type in ("llama", "gpt2"):
        reference = save_tiny(tmp_path / model_type, model_type)
        kernels = PlainKernels(deterministic=False)
        prompt = prompt_of(12)
        driver = read_driver(tmp_path / model_type, kernels, dtype=torch.bfloat16)
        run = driver.generate([prompt], 1)[0]
        expected = greedy(reference, prompt, 1)[1]
        assert run.logits[0].dtype == torch.float32
        difference = (logprobs(run) - expected).abs().max()
        assert 1e-4 < difference < 0.5


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        pytest.param("[" * 100_000, "is not JSON: it has too many levels", id="deep"),
        ("{}", "model_type=None"),
        (
            '{"model_type": "nothing_known"}',
            "model_type='nothing_known' in .* these are served: llama, .*gpt2",
        ),
        ('{"model_type": "llama", "num_attention_heads": "four"}', "num_attention_heads='four'"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "is not a valid gpt2 config"),
        ('{"model_type": "codegen"}', "'codegen' is not supported; these are: llama, .*gpt2"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"model_type": "deepseek_v3_turbo"}, "deepseek_v3"),
        ({"model_type": "qwen3x"}, "qwen3"),
        ({"model_type": "xyz", "n_routed_experts": 8, "kv_lora_rank": 4}, "glm4_moe_lite"),
        ({"model_type": "xyz", "final_logit_softcapping": 3.0}, "gemma2"),
    ],
)
def test_an_unknown_class_ends_with_the_nearest_family(
    fields: dict[str, Any], nearest: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4} | fields))
    with pytest.raises(UnsupportedModel, match=rf"served: llama, .*; the nearest is {nearest}$"):
        ModelDescription.read(tmp_path)


def test_an_end_of_sequence_below_0_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edit_json(tmp_path / "generation_config.json", eos_token_id=[2, -1])
    with pytest.raises(ModelError, match=r"eos_token_id=\[2, -1\] is neither"):
        read_model(tmp_path)


def test_an_impossible_split_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="3 shards cannot share 4 attention heads"):
        read_model(tmp_path, group=ProcessGroup(0, 3, CPU))
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        read_model(tmp_path)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    assert read_model(tmp_path).info.vocab_size == VOCAB
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        read_model(tmp_path)


HIDDEN = 64
LAYER = "model.layers.1."


def change(folder: Path, changes: dict[str, Tensor]) -> None:
    """Add tensors to the file of a checkpoint, or replace them."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


def logits(folder: Path) -> Tensor:
    return read_driver(folder).generate([prompt_of(9)], 1)[0].logits[0]


def of_transformers(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        result: Tensor = model(torch.tensor([prompt_of(9)])).logits[0, -1]
    return result


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", f"{LAYER}self_attn.q_proj.bias"),
        ("qwen2", f"{LAYER}self_attn.o_proj.bias"),
        ("mistral", f"{LAYER}mlp.down_proj.bias"),
        ("cohere", f"{LAYER}input_layernorm.bias"),
        ("cohere", "model.norm.bias"),
        ("phi3", "lm_head.bias"),
        ("qwen3_moe", f"{LAYER}mlp.experts.3.up_proj.bias"),
        ("qwen3_moe", f"{LAYER}mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_bias_that_the_config_denies_is_refused_before_weights_are_read_unless_it_is_0(
    family: str, name: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    plain = logits(tmp_path)
    change(tmp_path, {name: torch.zeros(HIDDEN)})
    assert torch.equal(logits(tmp_path), plain)
    wrong = {"model.embed_tokens.weight": torch.zeros(1, 1)}
    change(tmp_path, {name: torch.eye(HIDDEN)[3], **wrong})
    with pytest.raises(WeightsError) as refusal:
        logits(tmp_path)
    assert str(refusal.value) == (
        f"tensor {name} in model.safetensors is a bias, and by its config the model has none there"
    )


def test_scales_of_inputs_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    change(tmp_path, {f"{LAYER}mlp.up_proj.input_scale": torch.ones(())})
    logits(tmp_path)
    change(tmp_path, {f"{LAYER}mlp.up_proj.pre_quant_scale": torch.ones(HIDDEN)})
    with pytest.raises(WeightsError, match=r"up_proj\.pre_quant_scale in .* scales the inputs"):
        logits(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_biases_that_one_rank_adds_are_read_by_all(rank: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    read_model(tmp_path, group=ProcessGroup(rank, 2, CPU))


def test_other_tensors_of_layers_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "glm4_moe", use_qk_norm=True)
    change(tmp_path, {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8)})
    logits(tmp_path)
    assert not caplog.records
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"use_qk_norm": true', '"use_qk_norm": false'))
    with caplog.at_level(logging.WARNING):
        logits(tmp_path)
    (record,) = caplog.records
    assert record.message.startswith(
        "8 tensors of the checkpoint are not used, since its config does not name them: "
        "model.layers.0.self_attn.k_norm.weight, model.layers.0.self_attn.q_norm.weight, "
    )


HEADS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "equal": (lambda embedding: embedding.clone(), False),
    "another": (lambda embedding: embedding.flip(0).contiguous(), True),
    "last-row": (
        lambda embedding: embedding + torch.eye(VOCAB, HIDDEN).flip(0) * 0.5,
        True,
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_tied_head_that_the_file_has_in_another_form_is_used_as_in_transformers(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    make, is_told = HEADS[head]
    change(tmp_path, {"lm_head.weight": make(embedding)})
    with caplog.at_level(logging.WARNING, "millrace_shard"):
        result = logits(tmp_path)
    assert any("another head" in record.message for record in caplog.records) is is_told
    torch.testing.assert_close(result, of_transformers(tmp_path), atol=1e-4, rtol=0)


QUANTIZED_HEADS = {
    "int-quantized": "it is used",
    "float-quantized": "it is used",
    "pack-quantized": "it is used",
    "ignored": "it is not used, since config.json does not say how it is quantised",
}


@pytest.mark.parametrize("method", QUANTIZED_HEADS)
def test_a_quantised_head_with_a_tied_embedding_is_reported(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers uses one in int8 and fails on the others; it is asked for a head of the same numbers."""
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    is_used = method != "ignored"
    head = FORMATS[method if is_used else "pack-quantized"]
    packed, values = head.pack(VOCAB, HIDDEN, torch.Generator().manual_seed(3))
    if is_used:
        change(tmp_path, {"lm_head.weight": values})
    expected = of_transformers(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors |= {f"lm_head.{kind}": tensor for kind, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    groups = {"group_0": head.config["config_groups"]["group_0"] | {"targets": ["re:.*lm_head"]}}
    config = {**head.config, "config_groups": groups, "ignore": [] if is_used else ["lm_head"]}
    edit_json(tmp_path / "config.json", quantization_config=config)
    with caplog.at_level(logging.WARNING, "millrace_shard"):
        result = logits(tmp_path)
    (message,) = (record.message for record in caplog.records if "another head" in record.message)
    assert message.endswith(f"the file has another head: {QUANTIZED_HEADS[method]}")
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    formats = code_formats(tmp_path, spec, quantize=None, rank=0, world_size=1)
    assert len(formats) == is_used


class Recording(PlainKernels):
    """Plain kernels that keep the shapes they meet."""

    def __init__(self) -> None:
        super().__init__(deterministic=False)
        self.attended: set[tuple[int, int, int]] = set()
        self.kinds: set[tuple[int | None, float | None]] = set()
        self.weights: list[tuple[int, ...]] = []
        self.head_weights: list[tuple[int, ...]] = []

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, **rule: Any) -> Tensor:
        self.attended.add((queries.shape[1], *cache.keys.shape[2:]))
        self.kinds.add((rule.get("window"), rule.get("softcap")))
        return super().attend(queries, batch, cache, **rule)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        self.weights.append(tuple(weight.shape))
        return super().linear(weight, bias)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        head = super().head(weight, lora)
        self.head_weights.append(self.weights.pop())
        return head


def record(folder: Path) -> Recording:
    kernels = Recording()
    read_driver(folder, kernels).generate([prompt_of(5, seed=0)], 1)
    return kernels


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_layer_shape_matches_the_model(model_type: str, tmp_path: Path) -> None:
    # Configs of these classes have no groups of heads.
    ungrouped: dict[str, Any] = (
        {"num_key_value_heads": 4} if model_type in {"gpt_neox", "opt"} else {}
    )
    save_tiny(tmp_path, model_type, **ungrouped)
    model, result = ModelDescription.read(tmp_path), record(tmp_path)
    shape, *others = shapes = model.layer_shapes(1)
    if model.spec is None or model.spec.attentions:
        assert result.attended == {(s.num_heads, s.num_kv_heads, s.head_dim) for s in shapes}
        assert result.kinds == set(shape.kinds)
    assert all(each.linears == shape.linears for each in others)
    if model_type in FAMILIES:
        assert set(result.weights) == set(shape.linears)
        assert result.head_weights == [shape.head]


def test_windows_may_differ_by_layer(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    save_tiny(tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, layer_types=kinds)
    assert set(ModelDescription.read(tmp_path).layer_shape(1).kinds) == {(9, None), (None, None)}
    assert record(tmp_path).kinds == {(9, None), (None, None)}


def test_the_layer_shape_is_the_part_of_one_rank(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    shape = ModelDescription.read(tmp_path).layer_shape(4)
    # The two key-value heads are held twice each.
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (1, 1, 16)
    assert set(shape.linears) == {(48, 64), (64, 16), (40, 64), (64, 20)}
    assert shape.head == (50, 64)
    with pytest.raises(UnsupportedModel, match="3 shards"):
        ModelDescription.read(tmp_path).layer_shape(3)
