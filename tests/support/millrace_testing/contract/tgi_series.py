"""The series that TGI's Grafana dashboard reads; every one has to be there once a server has had traffic."""

from __future__ import annotations

SERIES = (
    "tgi_batch_concat",
    "tgi_batch_current_max_tokens",
    "tgi_batch_current_size",
    "tgi_queue_size",
    "tgi_request_count",
    "tgi_request_duration_bucket",
    "tgi_request_failure",
    "tgi_request_generated_tokens_bucket",
    "tgi_request_generated_tokens_count",
    "tgi_request_generated_tokens_sum",
    "tgi_request_input_length_bucket",
    "tgi_request_mean_time_per_token_duration_bucket",
    "tgi_request_queue_duration_bucket",
    "tgi_request_skipped_tokens_bucket",
    "tgi_request_success",
    *(
        f'tgi_batch_{part}_duration_bucket{{method="decode"}}'
        for part in ("concat", "decode", "filter", "forward", "inference")
    ),
    'tgi_batch_inference_duration_bucket{method="prefill"}',
)
"""PromQL selectors of the series, without the label `container`, which the scraper adds."""
