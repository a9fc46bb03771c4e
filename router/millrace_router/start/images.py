"""Reads how the model's processor treats pictures, and checks that the router can do the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import orjson

from millrace_proto.small_files import read_small_file
from millrace_router.config import RouterConfig
from millrace_router.images.child import DecodingLimits, DecodingProcess
from millrace_router.images.families import geometry_of
from millrace_router.images.fetch import ImageFetcher
from millrace_router.images.geometry import AnyGeometry, GeometryError
from millrace_router.images.prompts import NO_IMAGES, ImagePrompts
from millrace_router.images.store import ImageStore
from millrace_router.shards.wire import VisionInfo
from millrace_router.start.shards import RouterDeployment, StartupError
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer

PROCESSOR_FILE = "preprocessor_config.json"
PROCESSORS_FILE = "processor_config.json"
"""In newer checkpoints, with the settings under `image_processor`, which come first, as in transformers."""
PAYLOAD_LIMIT = 32_000_000
"""Default of --payload-limit for models that read pictures, which are in the bodies."""


def open_images(
    deployment: RouterDeployment, tokenizer: Tokenizer, metrics: Metrics
) -> ImagePrompts:
    """Return what makes prompts of pictures; empty for a model that reads only text. Raises StartupError."""
    config, vision = deployment.config, deployment.info.vision
    if vision is None:
        return NO_IMAGES
    geometry = _geometry(config.model_folder, vision)
    _check(config, vision, geometry, tokenizer, feature_rows=deployment.capacity.feature_rows)
    limits = DecodingLimits(
        max_bytes=int(config.max_image_bytes),
        max_pixels=config.max_image_pixels,
        seconds=config.image_timeout,
    )
    store = ImageStore(
        DecodingProcess(geometry, limits),
        ImageFetcher(config.image_url_hosts, max_bytes=limits.max_bytes),
        rows_per_tile=vision.rows_per_tile,
        extra_rows=vision.extra_rows,
        cell=vision.cell,
        max_images=config.max_images_per_request,
        max_rows=deployment.capacity.feature_rows,
        max_memory=int(config.max_image_memory),
        metrics=metrics,
    )
    return ImagePrompts(store, tokenizer.control_tokens)


def with_image_bodies(deployment: RouterDeployment) -> RouterDeployment:
    """Return the deployment, where the default of --payload-limit has room for pictures if the model reads them."""
    config = deployment.config
    if deployment.info.vision is None or config.payload_limit != _default_limit():
        return deployment
    config = config.model_copy(update={"payload_limit": PAYLOAD_LIMIT})
    return RouterDeployment(config=config, info=deployment.info, capacity=deployment.capacity)


def _default_limit() -> int:
    limit: int = RouterConfig.model_fields["payload_limit"].default
    return limit


def _geometry(folder: Path, vision: VisionInfo) -> AnyGeometry:
    path, newer = folder / PROCESSOR_FILE, folder / PROCESSORS_FILE
    try:
        processor = None
        if newer.is_file():
            processors = orjson.loads(read_small_file(newer))
            processor = processors.get("image_processor") if isinstance(processors, dict) else None
        if processor is None:
            processor = orjson.loads(read_small_file(path))
        else:
            path = newer
        if not isinstance(processor, dict):
            raise StartupError(f"{path} does not hold a JSON object with the settings of images")
        # What the classes in transformers take from config.json.
        own = {"cell": vision.cell, "max_grid_tiles": vision.max_grid_tiles}
        return geometry_of(vision.family, {**processor, **{k: v for k, v in own.items() if v}})
    except (OSError, orjson.JSONDecodeError) as error:
        raise StartupError(
            f"{path}, which models with images need, cannot be read: {error}"
        ) from error
    except GeometryError as error:
        raise StartupError(f"{path} does not fit: {error}") from error


def _check(
    config: RouterConfig,
    vision: VisionInfo,
    geometry: AnyGeometry,
    tokenizer: Tokenizer,
    *,
    feature_rows: int,
) -> None:
    if find_spec("PIL") is None:
        raise StartupError(
            "the model reads images: install Pillow, which the extra `images` of the router has"
        )
    size = vision.cell or vision.tile_height
    if geometry.unit != size:
        raise StartupError(
            f"{PROCESSOR_FILE} has tiles of {geometry.unit} pixels, and the model of {size} x {size}"
        )
    needed = geometry.needed_tokens
    missing = [token for token in needed if token not in tokenizer.control_tokens.stand_ins]
    if missing or tokenizer.id_of(needed[0]) != vision.image_token_id:
        raise StartupError(f"the tokenizer lacks {', '.join(missing) or needed[0]}")
    if config.allow_special_tokens_in_content:
        raise StartupError(
            "--allow-special-tokens-in-content cannot be used with a model that reads images: texts of clients would"
            " become placeholders"
        )
    rows = geometry.most_rows or vision.rows_per_tile
    most = geometry.most_tiles * rows + vision.extra_rows
    if most > feature_rows:
        raise StartupError(
            f"the shards have {feature_rows} rows for features, and an image may need {most}"
        )
