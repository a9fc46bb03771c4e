"""The flags of launcher, router and shard, their groups in --help, and other servers' flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic_settings import BaseSettings

from millrace_launcher.config import LauncherConfig
from millrace_proto.flags import Flag, flags_in
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

OWNERS: Mapping[str, type[BaseSettings]] = {
    "launcher": LauncherConfig,
    "router": RouterConfig,
    "shard": ShardConfig,
}
# Settings that the launcher passes to its children, and that users cannot give to the launcher.
WIRING: Mapping[str, frozenset[str]] = {
    "launcher": frozenset(),
    "router": frozenset(
        {
            "model_folder",
            "model_id",
            "tokenizer_name",
            "revision",
            "shard_addresses",
            "master_shard_uds_path",
            "supervisor_fd",
            "listen_fd",
            "state_fd",
            "run_log_fd",
            "is_successor",
            "json_output",
            "log_level",
        }
    ),
    "shard": frozenset(
        {
            "model_folder",
            "uds_path",
            "launcher_fd",
            "address",
            "tls_cert",
            "tls_key",
            "tls_ca",
            "rank",
            "world_size",
            "sharded",
            "revision",
            "max_input_tokens",
            "max_total_tokens",
            "otlp_endpoint",
            "otlp_protocol",
            "otlp_service_name",
            "json_output",
            "log_level",
            "logger_level",
        }
    ),
}
SHORTS: Mapping[str, str] = {"port": "-p", "graceful_termination_timeout": "-g"}
SECRETS = frozenset({"api_key", "admin_key", "ngrok_authtoken"})


def all_flags() -> Iterator[Flag]:
    """All flags of the launcher, as `flags_of`."""
    return flags_of(OWNERS, WIRING)


def flags_of(
    owners: Mapping[str, type[BaseSettings]], hidden: Mapping[str, frozenset[str]]
) -> Iterator[Flag]:
    """The fields of all owners but the `hidden` ones, in the order of declaration; a shared flag appears once."""
    seen: set[str] = set()
    for owner, config in owners.items():
        for flag in flags_in(owner, config.model_fields):
            if flag.name not in hidden[owner] and flag.name not in seen:
                seen.add(flag.name)
                yield flag


NO_EFFECT = ("No effect", "Refused:", "Old name of")
"""Beginnings of the descriptions of flags that are accepted for TGI's sake."""
LAST = "Accepted for TGI, without effect"
OTHERS = "Ranks and addresses"
NAMES: dict[str, str] = {
    "Model": "model_id task revision tokenizer_name mmproj tokenizer_config_path quantize quantize_activations dtype"
    " packed_weights_size kv_cache_dtype"
    " draft_model speculator speculate rope_scaling rope_factor hf_overrides allow_unlisted_model huggingface_hub_cache"
    " weights_cache_override",
    "Devices and memory": "num_shard sharded device cpu_threads kv_memory kv_groups cuda_memory_fraction cuda_graphs"
    " one_shot_all_reduce deterministic disable_custom_kernels disable_operators shard_uds_path master_addr master_port"
    " remote_shards cluster shards_per_node",
    "Limits": "max_input_tokens max_total_tokens default_max_new_tokens max_new_tokens_limit"
    " strict_max_tokens max_concurrent_requests max_queue_size max_queue_wait max_best_of max_n"
    " max_stop_sequences max_top_n_tokens max_client_batch_size"
    " payload_limit grammar_timeout max_grammar_bytes",
    "Scheduling": "max_batch_size max_batch_prefill_tokens max_batch_total_tokens prefill_order"
    " prefix_caching kv_events kv_events_replay kv_events_topic"
    " kv_events_any_host kv_reservation target_inter_token_latency fairness priority_ageing steps_in_flight"
    " late_planning",
    "API": "hostname port root_path served_model_name tool_call_parser reasoning_parser generation_config strict_fields"
    " strict_tgi allow_special_tokens_in_content disable_grammar_support enable_prefill_logprobs"
    " watermark_gamma watermark_delta responses_store responses_store_seconds cors_allow_origin"
    " aip_predict_route aip_health_route validation_workers",
    "Images": "max_image_bytes max_image_pixels max_images_per_request max_image_memory image_timeout"
    " image_url_hosts",
    "LoRA adapters": "enable_lora lora_adapters lora_modules lora_paths adapter_id adapter_source preloaded_adapter_ids"
    " adapter_root adapter_allow adapter_cache adapter_cache_size adapter_memory adapter_memory_fraction max_loras"
    " max_loras_per_batch max_active_adapters max_lora_rank adapter_cycle_time_s unknown_model",
    "Security": "api_key api_key_file admin_key ssl_certfile ssl_keyfile ssl_ca_certs shard_tls_cert"
    " shard_tls_key shard_tls_ca allow_insecure_tcp",
    "Failures and replay": "step_timeout recovery_grace resume_grace max_restarts fork_server verify_kv drain_delay"
    " graceful_termination_timeout journal"
    " journal_tokens journal_max_bytes",
    "Logs, metrics and traces": "log_level json_output log_colorize log_requests log_requests_max_bytes otlp_endpoint"
    " otlp_protocol otlp_service_name",
}


def grouped(flags: Sequence[Flag]) -> Iterator[tuple[str, list[Flag]]]:
    """Yield each group's title with its flags, in the order in which they are shown."""
    left = {flag.name: flag for flag in flags}
    last = [left.pop(flag.name) for flag in flags if flag.help.startswith(NO_EFFECT)]
    for title, names in NAMES.items():
        yield title, [left.pop(name) for name in names.split() if name in left]
    if left:
        yield OTHERS, list(left.values())
    yield LAST, last
