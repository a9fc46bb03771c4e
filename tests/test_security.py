"""Data never contains code that runs, and each claim of the threat model has tests.

`python -m tests.test_security` prints the tests of each claim.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("proto", "router", "shard", "launcher", "package", "deploy")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGE = ROOT / "docs" / "security.md"

RUNNERS = frozenset({"eval", "exec", "compile", "__import__"})
"""Builtins that make text into code."""
UNPICKLERS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})
LOADERS = frozenset({"from_pretrained", "from_config"})
"""Methods of transformers' Auto classes, which may run code of a repository."""
OBJECT_COLLECTIVES = re.compile(r"\w*(object_list|gather_object|broadcast_object)\w*")
"""Functions of torch.distributed that pickle."""
ALLOWED = {
    # Imported for the errors of torch's restricted unpickler; nothing is read with it.
    ("shard/millrace_shard/commands/convert.py", "imports pickle"),
}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Parts of a module that could run data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"imports {n.name}" for n in node.names if _root(n.name) in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and _root(node.module or "") in UNPICKLERS:
            yield f"imports from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _dangers_of_call(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in UNPICKLERS:
            yield from () if node.attr == "UnpicklingError" else (f"uses {ast.unparse(node)}",)


def _dangers_of_call(call: ast.Call) -> Iterator[str]:
    called = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if called in RUNNERS or OBJECT_COLLECTIVES.fullmatch(_leaf(called)):
        yield f"calls {called}"
    if called == "torch.load" and not _is(keywords.get("weights_only"), value=True):
        yield "calls torch.load without weights_only"
    if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], value=False):
        # The flag is declared and forwarded as a field, and is no argument of a loader.
        yield f"passes trust_remote_code to {called}"
    if not _is(keywords.get("shell"), value=False) and "shell" in keywords:
        yield f"calls {called} with a shell"
    if called in {"os.system", "os.popen", "yaml.load", "np.load", "numpy.load"}:
        yield f"calls {called}"
    owner, _, method = called.rpartition(".")
    is_of_transformers = _leaf(owner).startswith("Auto") and method in LOADERS
    if is_of_transformers and not _is(keywords.get("trust_remote_code"), value=False):
        yield f"calls {called} without trust_remote_code=False"


def _root(module: str) -> str:
    return module.partition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is(node: ast.expr | None, *, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_that_is_read_is_run() -> None:
    found = {
        (str(path.relative_to(ROOT)), danger)
        for path in SOURCES
        for danger in dangers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(SOURCES) > 100
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.nn, dill.detect",
        "pickle.loads(x)",
        "eval(x)",
        "exec(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=flag)",
        "AutoConfig.from_pretrained(x)",
        "transformers.AutoModel.from_config(x)",
        "AutoConfig.from_pretrained(x, trust_remote_code=config.trust_remote_code)",
        "load(x, trust_remote_code=True)",
        "dist.all_gather_object(a, b)",
        "torch.distributed.broadcast_object_list(a)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)
def test_each_danger_is_detected(code: str) -> None:
    assert list(dangers(ast.parse(code)))


def test_model_eval_and_safe_loads_are_no_danger() -> None:
    code = (
        "model.eval(); re.compile(x); torch.load(x, weights_only=True); f(trust_remote_code=False)"
    )
    assert list(dangers(ast.parse(code))) == []


BOUNDARIES = (
    "Client to router",
    "Operator to router",
    "Router to shard",
    "Launcher to children",
    "Model files",
    "Downloads",
    "Adapters",
    "Disk",
    "Logs",
    "Dependencies",
)
PROOFS: dict[str, tuple[str, ...]] = {
    "C1": (
        "tests/router/security/test_security.py::test_the_key_is_compared_in_constant_time",
        "tests/router/security/test_security.py::test_a_wrong_key_learns_nothing",
    ),
    "C2": (
        "tests/router/access/test_access.py::test_every_key_is_compared_whole",
        "tests/router/access/test_access.py::test_names_are_logged_and_keys_are_not",
        "tests/router/access/test_access.py::test_a_changed_file_is_read_and_a_bad_one_is_not",
        "tests/router/access/test_access.py::test_mistakes_are_named_without_the_key",
    ),
    "C3": ("tests/router/server/test_traces.py::test_no_span_has_text_or_a_key",),
    "C4": ("tests/router/access/test_access.py::test_names_are_logged_and_keys_are_not",),
    "C5": ("tests/router/access/test_access.py::test_clients_need_a_certificate_of_the_authority",),
    "C6": (
        "tests/router/server/test_bodies.py::test_the_limit_itself_is_allowed",
        "tests/router/server/test_bodies.py::test_compressed_bodies_are_read_or_refused",
    ),
    "C7": ("tests/router/server/test_bodies.py::test_a_body_that_does_not_end_is_not_waited_for",),
    "C8": (
        "tests/router/security/test_security.py::test_levels_of_json_do_not_depend_on_the_content_of_strings",
        "tests/router/security/test_security.py::test_containers_are_counted_and_brackets_in_strings_are_not",
        "tests/router/security/test_security.py::test_each_route_refuses_with_a_type",
    ),
    "C9": (
        "tests/router/security/test_security.py::test_of_a_million_mistakes_one_is_looked_at",
        "tests/router/security/test_security.py::test_no_list_of_a_body_collects_mistakes",
    ),
    "C10": (
        "tests/router/security/test_security.py::test_numbers_and_texts_that_are_none_are_no_json",
        "tests/router/server/test_bodies.py::test_no_body_ends_in_a_500",
    ),
    "C11": (
        "tests/router/security/test_security.py::test_headers_have_bounds_too",
        "tests/router/server/test_connections.py::test_long_headers_get_431_in_the_form_of_their_route",
        "tests/router/server/test_connections.py::test_unfinished_headers_are_given_a_time",
        "tests/router/server/test_connections.py::test_a_header_of_64_kb_is_taken",
    ),
    "C12": (
        "tests/router/security/test_security.py::test_text_that_cannot_fit_is_refused_without_tokenizing_it",
        "tests/router/text/test_tokenizer.py::test_no_text_becomes_fewer_tokens",
    ),
    "C13": ("tests/router/security/test_security.py::test_stop_sequences_have_a_greatest_length",),
    "C14": (
        "tests/router/engine/test_infer.py::test_overload_predicts_when_to_retry",
        "tests/router/server/test_sse.py::test_the_frame_after_too_many_cuts_off_and_frees_them",
        "tests/e2e/test_overload.py::test_ten_times_the_capacity_is_answered_exactly_or_refused_with_429",
        "tests/e2e/test_overload.py::test_idle_connections_and_slow_senders_block_no_other_client",
    ),
    "C15": (
        "tests/router/server/test_idempotency.py::test_callers_share_nothing",
        "tests/router/server/test_idempotency.py::test_contradictory_uses_of_a_key_are_refused",
        "tests/router/server/test_idempotency.py::test_the_bytes_of_kept_runs_are_bounded",
    ),
    "C16": (
        "tests/router/api/test_stored_responses.py::test_no_client_can_read_the_response_of_another_key",
        "tests/router/api/test_stored_responses.py::test_the_oldest_is_forgotten_when_memory_is_short",
        "tests/router/api/test_stored_responses.py::test_a_response_is_forgotten_in_time",
        "tests/router/api/test_stored_responses.py::test_a_conversation_may_not_grow_beyond_a_body",
    ),
    "C17": (
        "tests/router/api/test_pages.py::test_the_policy_allows_the_page_itself_and_nothing_else",
        "tests/router/api/test_pages.py::test_no_script_makes_markup_of_text",
        "tests/ecosystem/test_pages.py::test_pages_pass_their_cases_in_a_browser",
    ),
    "C18": (
        "tests/router/security/test_security.py::test_text_of_clients_is_never_run_as_a_template",
        "tests/router/text/test_chat_template.py::test_contents_are_never_interpreted",
    ),
    "C19": ("tests/router/tool_calls/test_grammars.py::test_limits_of_grammars_hold",),
    "C20": (
        "tests/router/security/test_security.py::test_indented_json_does_not_grow_without_bound",
    ),
    "C21": (
        "tests/router/security/test_security.py::test_large_arguments_of_a_template_are_rendered_in_another_thread",
        "tests/router/text/test_chat_template.py::test_few_large_conversations_are_rendered_at_a_time",
        "tests/router/text/test_chat_template.py::test_a_render_that_takes_too_long_is_abandoned",
    ),
    "C22": (
        "tests/router/request/test_schemas.py::test_a_grammar_has_a_greatest_size",
        "tests/router/request/test_schemas.py::test_a_schema_has_a_greatest_depth",
        "tests/router/request/test_schemas.py::test_a_grammar_has_a_greatest_number_of_parts",
        "tests/router/validation/test_grammar_admission.py::test_the_number_of_waiting_grammar_checks_is_bounded",
        "tests/router/validation/test_grammar_routes.py::test_other_requests_do_not_wait_for_a_grammar",
        "tests/shard/structured_output/test_grammar_compiler.py::test_grammars_that_take_long_hold_up_none_that_does_not",
        "tests/e2e/test_guided.py::test_a_hostile_grammar_ends_no_other_stream",
    ),
    "C23": (
        "tests/router/validation/test_grammar_admission.py::test_a_grammar_that_breaks_the_shards_is_refused_without_its_neighbours",
    ),
    "C24": (
        "tests/router/api/test_choices.py::test_n_outside_its_bounds_is_refused",
        "tests/router/api/test_choices.py::test_choices_get_a_permit_each_or_none",
        "tests/router/api/test_reading.py::test_the_number_of_biases_has_a_limit",
    ),
    "C25": (
        "tests/router/server/test_connections.py::test_at_the_limit_the_oldest_idle_connection_goes_with_one_line_in_the_log",
        "tests/router/server/test_connections.py::test_a_connection_that_waits_for_its_answer_does_not_go",
        "tests/router/server/test_connections.py::test_idle_connections_are_kept_for_75_seconds",
        "tests/router/server/test_connections.py::test_an_idle_connection_keeps_neither_body_nor_answer",
    ),
    "C26": (
        "tests/router/server/test_connections.py::test_unfinished_bodies_share_a_bounded_memory",
        "tests/router/server/test_connections.py::test_unfinished_headers_share_that_memory",
    ),
    "C27": (
        "tests/router/server/test_connections.py::test_a_full_server_parses_no_body",
        "tests/router/server/test_connections.py::test_large_bodies_are_parsed_one_at_a_time",
        "tests/router/server/test_connections.py::test_large_bodies_are_translated_off_the_loop",
        "tests/router/server/test_connections.py::test_conversations_have_a_bounded_number_of_turns",
        "tests/router/server/test_connections.py::test_requests_have_a_bounded_number_of_tools",
        "tests/router/server/test_connections.py::test_a_refused_field_is_noticed_behind_thousands_of_unknown_ones",
    ),
    "C28": (
        "tests/router/server/test_connections.py::test_estimates_wait_in_a_bounded_line_and_take_no_permit",
        "tests/router/server/test_connections.py::test_few_texts_are_tokenized_at_a_time_for_their_own_sake",
        "tests/router/text/test_tokenizer.py::test_long_texts_do_not_delay_short_ones",
    ),
    "C29": (
        "tests/router/server/test_connections.py::test_a_tenant_cannot_take_the_permits_that_are_reserved_for_others",
        "tests/router/server/test_idempotency.py::test_runs_without_readers_are_at_most_a_quarter_of_the_permits",
        "tests/router/server/test_idempotency.py::test_a_full_server_ends_runs_without_readers_first",
    ),
    "C30": (
        "tests/router/adapters/test_fetcher.py::test_callers_that_wait_to_fetch_alternate",
        "tests/router/adapters/test_fetcher.py::test_no_caller_can_fill_the_fetch_queue",
    ),
    "C31": (
        "tests/router/server/test_continuing.py::test_the_log_has_no_credentials",
        "tests/router/server/test_continuing.py::test_a_body_that_may_have_a_credential_is_not_in_the_log",
        "tests/router/server/test_continuing.py::test_another_caller_path_or_body_does_not_get_it",
        "tests/router/server/test_run_log.py::test_a_forgotten_run_is_gone",
        "tests/router/request/test_names.py::test_names_differ_by_stream_caller_part_kind_and_number",
    ),
    "C32": (
        "tests/router/images/test_preparing.py::test_a_bomb_is_refused_by_its_header",
        "tests/router/images/test_preparing.py::test_a_picture_that_breaks_the_time_costs_the_process_and_the_next_one_works",
        "tests/router/images/test_preparing.py::test_the_process_can_open_nothing",
        "tests/router/images/test_preparing.py::test_mutated_pictures_are_answered_one_way_or_the_other",
        "tests/router/images/test_store.py::test_images_of_requests_stay_and_others_wait_and_are_refused",
        "tests/router/images/test_store.py::test_an_image_that_broke_the_process_does_not_get_to_it_again",
        "tests/router/api/test_images.py::test_more_images_or_tokens_than_allowed_are_refused_by_their_part",
    ),
    "C33": (
        "tests/router/images/test_fetch.py::test_addresses_of_no_public_host_are_refused",
        "tests/router/images/test_fetch.py::test_other_addresses_than_those_of_the_flag_are_refused",
        "tests/router/images/test_fetch.py::test_a_name_with_one_private_address_is_refused",
        "tests/router/images/test_fetch.py::test_a_redirect_is_not_followed",
        "tests/router/images/test_fetch.py::test_an_error_says_nothing_of_the_answer",
        "tests/router/images/test_fetch.py::test_a_body_is_read_only_up_to_the_limit",
    ),
    "C34": (
        "tests/router/images/test_store.py::test_keys_depend_on_the_image_its_place_and_its_rows",
        "tests/router/api/test_images.py::test_a_placeholder_that_a_client_writes_is_text",
        "tests/router/engine/test_images.py::test_answers_do_not_depend_on_company_chunks_hits_preemptions_and_failures",
    ),
    "O1": (
        "tests/router/security/test_security.py::test_nothing_of_a_request_is_logged_or_public",
    ),
    "O2": (
        "tests/router/recovery/test_quarantine.py::test_the_key_opens_the_route",
        "tests/router/recovery/test_quarantine.py::test_the_route_shows_no_text_and_no_ids",
    ),
    "S1": (
        "tests/shard/server/test_address.py::test_no_other_user_reaches_a_shard_with_any_umask",
        "tests/shard/commands/test_serve.py::test_a_shard_in_use_is_neither_replaced_nor_cut_off",
        "tests/e2e/test_secrets.py::test_only_their_user_can_open_the_sockets_of_shards",
    ),
    "S2": (
        "tests/shard/server/test_address.py::test_a_socket_that_answers_is_kept_and_named",
        "tests/shard/server/test_address.py::test_a_file_that_is_not_a_socket_is_never_replaced",
    ),
    "S3": (
        "tests/shard/server/test_address.py::test_a_client_of_the_same_authority_is_served",
        "tests/shard/server/test_address.py::test_other_clients_are_refused",
        "tests/router/shards/test_channels.py::test_shards_are_not_reached_without_matching_certificates",
    ),
    "S4": ("tests/e2e/test_tls.py::test_a_shard_serves_only_its_router_over_tls",),
    "S5": (
        "tests/router/shards/test_channels.py::test_shards_of_another_authority_or_name_are_refused",
    ),
    "S6": (
        "tests/shard/server/test_address.py::test_only_addresses_of_this_host_need_no_tls",
        "tests/shard/server/test_address.py::test_the_program_refuses_before_it_loads_anything",
        "tests/router/shards/test_channels.py::test_only_plain_connections_to_other_hosts_are_exposed",
    ),
    "S7": ("tests/deploy/test_monitoring.py::test_shard_health_has_the_shard_s_papers",),
    "S8": ("tests/test_security.py::test_nothing_that_is_read_is_run",),
    "S9": (
        "tests/router/start/test_start.py::test_events_are_published_to_other_hosts_only_with_a_flag",
    ),
    "L1": (
        "tests/e2e/test_secrets.py::test_command_lines_hold_no_secrets_and_shards_no_key",
        "tests/launcher/settings/test_commands.py::test_the_router_reads_its_settings_from_its_command",
    ),
    "M1": (
        "tests/shard/commands/test_convert.py::test_code_in_a_pickle_is_not_run",
        "tests/shard/weights/test_hub.py::test_models_that_are_only_pickles_are_refused_with_the_conversion",
        "tests/test_security.py::test_nothing_that_is_read_is_run",
    ),
    "M2": (
        "tests/test_security.py::test_nothing_that_is_read_is_run",
        "tests/test_security.py::test_each_danger_is_detected",
    ),
    "M3": (
        "tests/shard/weights/quantized/test_refusals.py::test_every_damage_to_every_tensor_is_named",
        "tests/shard/weights/quantized/test_refusals.py::test_mutated_checkpoints_are_refused_or_loaded",
        "tests/shard/weights/gguf/test_files.py::test_mutated_headers_are_refused_or_loaded",
    ),
    "M4": ("tests/router/security/test_security.py::test_a_template_cannot_leave_its_sandbox",),
    "M5": (
        "tests/router/text/test_chat_template.py::test_a_template_that_does_not_end_leaves_the_event_loop_and_is_stopped",
    ),
    "M6": ("tests/proto/test_small_files.py::test_only_regular_files_of_a_bounded_size_are_read",),
    "D1": (
        "tests/shard/weights/test_hub.py::test_a_fresh_download_takes_only_the_files_that_serving_needs",
    ),
    "A1": (
        "tests/router/adapters/test_resolver.py::test_clients_may_name_only_folders_below_the_root",
        "tests/router/start/test_start.py::test_only_folders_below_the_root_can_be_named",
    ),
    "A2": (
        "tests/router/adapters/test_resolver.py::test_unregistered_names_are_unknown_by_default",
        "tests/router/adapters/test_resolver.py::test_the_operator_may_open_ids_on_the_hub",
        "tests/router/adapters/test_resolver.py::test_the_operators_adapters_use_the_servers_token_and_clients_never",
        "tests/router/adapters/test_fetcher.py::test_the_servers_token_counts_only_for_the_operators_adapters",
    ),
    "A3": (
        "tests/router/adapters/test_resolver.py::test_a_private_name_is_not_confirmed_without_a_token",
        "tests/router/adapters/test_resolver.py::test_a_revoked_token_is_refused_after_a_minute",
        "tests/router/adapters/test_resolver.py::test_a_hub_that_fails_opens_nothing",
    ),
    "A4": (
        "tests/router/security/test_security.py::test_an_adapter_token_reaches_no_log_answer_or_shard",
        "tests/router/security/test_security.py::test_remembered_access_contains_no_token",
    ),
    "A5": (
        "tests/e2e/test_adapter_tokens.py::test_an_adapter_token_is_stored_and_shown_nowhere",
        "tests/e2e/test_adapter_tokens.py::test_all_places_were_searched",
    ),
    "A6": (
        "tests/router/api/test_model_names.py::test_only_clients_with_the_key_see_names_of_adapters",
        "tests/router/api/test_model_names.py::test_private_ids_are_listed_only_for_clients_with_access",
    ),
    "A7": ("tests/router/adapters/test_resolver.py::test_made_up_names_leave_nothing_behind",),
    "A8": (
        "tests/router/adapters/test_resolver.py::test_names_that_logs_cannot_show_are_refused",
        "tests/router/api/test_adapters.py::test_headers_hold_any_name_and_all_names",
    ),
    "A9": (
        "tests/router/adapters/test_local.py::test_links_that_lead_out_are_not_followed",
        "tests/router/adapters/test_local.py::test_files_that_lead_out_are_not_read",
        "tests/router/adapters/test_local.py::test_a_folder_that_becomes_a_link_after_resolution_is_not_followed",
    ),
    "A10": (
        "tests/router/adapters/test_local.py::test_a_pickle_is_never_read",
        "tests/router/adapters/test_hub.py::test_a_pickle_is_not_downloaded",
    ),
    "A11": (
        "tests/router/adapters/test_canonical.py::test_wrong_tensor_files_are_named",
        "tests/router/adapters/test_canonical.py::test_each_defect_is_named",
        "tests/router/adapters/test_peft_config.py::test_refusals_name_the_field",
        "tests/router/adapters/test_local.py::test_mutated_adapters_are_accepted_or_refused",
    ),
    "A12": (
        "tests/router/adapters/test_hub.py::test_sizes_are_checked_before_the_download",
        "tests/router/adapters/test_hub.py::test_redirects_keep_the_token_only_within_the_hub",
    ),
    "A13": (
        "tests/router/adapters/test_fetcher.py::test_a_pattern_that_never_ends_is_killed",
        "tests/router/adapters/test_fetcher.py::test_memory_has_a_limit",
    ),
    "A14": (
        "tests/router/adapters/test_fetcher.py::test_two_fetches_run_at_once",
        "tests/router/adapters/test_fetcher.py::test_no_caller_can_fill_the_fetch_queue",
    ),
    "A15": ("tests/router/adapters/test_hub.py::test_no_token_is_left_anywhere",),
    "A16": ("tests/router/api/test_adapters.py::test_only_the_admin_key_opens_the_adapter_routes",),
    "A17": (
        "tests/router/api/test_adapters.py::test_a_repetition_with_another_token_is_another_request",
    ),
    "K1": (
        "tests/shard/kernels/test_build.py::test_libraries_that_any_user_can_write_are_not_loaded",
        "tests/shard/kernels/test_build.py::test_libraries_that_another_user_built_are_not_loaded",
        "tests/shard/kernels/test_choose.py::test_a_cache_that_other_users_can_write_is_not_used",
    ),
    "K2": (
        "tests/shard/weights/test_hub.py::test_a_folder_that_others_can_write_is_refused_for_a_model",
        "tests/shard/weights/test_hub.py::test_another_users_folder_is_refused_for_a_model",
    ),
    "K3": ("tests/router/journal/test_journal.py::test_only_their_user_reads_journals",),
    "K4": (
        "tests/router/journal/test_journal.py::test_without_tokens_nothing_of_the_text_is_written",
        "tests/router/journal/test_journal.py::test_hashes_of_prompts_match_only_within_one_process",
    ),
    "G1": (
        "tests/router/security/test_security.py::test_nothing_of_a_request_is_logged_or_public",
        "tests/e2e/test_secrets.py::test_no_log_of_any_process_contains_a_secret",
        "tests/router/telemetry/test_logs.py::test_malformed_requests_are_not_quoted",
        "tests/router/telemetry/test_logs.py::test_tracebacks_do_not_show_variables",
        "tests/router/telemetry/test_logs.py::test_line_breaks_in_values_start_no_line",
    ),
    "G2": (
        "tests/router/server/test_access_log.py::test_the_line_has_the_tenant_if_tenants_count",
    ),
    "G3": ("tests/router/telemetry/test_logs.py::test_only_its_user_may_read_the_request_file",),
    "P1": ("tests/test_boundaries.py::test_importing_a_package_loads_no_forbidden_module",),
}
"""The tests of each claim of docs/security.md, as `file::test`."""
CLAIM = re.compile(r"^\| ([A-Z]\d+) \||\(([A-Z]\d+)\)", re.MULTILINE)


def table() -> str:
    """The tests of each claim, as Markdown."""
    rows = (
        f"| {claim} | {', '.join(f'`{test}`' for test in tests)} |\n"
        for claim, tests in PROOFS.items()
    )
    return f"| claim | tests |\n|---|---|\n{''.join(rows)}"


def chapters() -> dict[str, list[str]]:
    """The claims in each chapter of the page, by its title."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        title: [row or inline for row, inline in CLAIM.findall(text)]
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_every_claim_has_a_test_and_every_boundary_a_claim() -> None:
    assert tuple(chapters()) == BOUNDARIES
    assert all(chapters().values())
    claims = [claim for claims in chapters().values() for claim in claims]
    assert sorted(claims) == sorted(PROOFS)
    assert all(PROOFS.values())


@pytest.mark.parametrize(
    "path", sorted({t.partition("::")[0] for ts in PROOFS.values() for t in ts})
)
def test_the_threat_model_names_tests_that_exist(path: str) -> None:
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = {
        test.partition("::")[2]
        for tests in PROOFS.values()
        for test in tests
        if test.startswith(f"{path}::")
    }
    assert named <= functions


if __name__ == "__main__":
    sys.stdout.write(table())
