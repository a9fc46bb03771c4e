"""The images of a hash shard: pixels in slots, and features in rows, which are hashes of the pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

from millrace_proto import generate_pb2 as pb
from millrace_router.request.images import ImageSpan, Mask, PreparedImage, spans_of
from millrace_router.request.request import ValidRequest

IMAGE_TOKEN_ID = 94
EDGE = 2
TILE_BYTES = 3 * EDGE * EDGE
ROWS_PER_TILE = 2
NUM_LAYERS = 3


def image_of(name: str, num_tiles: int = 1) -> PreparedImage:
    """An image of so many tiles in a row, and the whole as one if they are several."""
    count = num_tiles + (num_tiles > 1)
    pixels = b"".join(
        sha256(f"{name} {tile}".encode()).digest()[:TILE_BYTES] for tile in range(count)
    )
    return PreparedImage(
        digest=sha256(pixels).digest(),
        rows=int(num_tiles > 1),
        columns=num_tiles if num_tiles > 1 else 0,
        num_tiles=count,
        height=EDGE,
        width=EDGE,
        rows_per_tile=ROWS_PER_TILE,
        pixels=pixels,
    )


def request_with(
    parts: Iterable[Sequence[int] | PreparedImage], max_new_tokens: int
) -> ValidRequest:
    """A greedy request whose prompt has token ids and images; tiles of one image have a token between them."""
    ids: list[int] = []
    images = []
    for part in parts:
        if not isinstance(part, PreparedImage):
            ids += part
            continue
        images.append(part)
        for tile in range(part.num_tiles):
            ids += [tile + 1, *[IMAGE_TOKEN_ID] * ROWS_PER_TILE]
    spans = spans_of(ids, IMAGE_TOKEN_ID, images)
    return ValidRequest(input_ids=tuple(ids), max_new_tokens=max_new_tokens, images=spans)


def seen_by_model(request: ValidRequest) -> list[int]:
    """The prompt with features in place of the placeholders: the tokens that its answer depends on."""
    ids = list(request.input_ids)
    for span in request.images:
        for index in range(span.tokens):
            ids[span.position + index] = feature_of(span, index)
    return ids


def feature_of(span: ImageSpan, index: int) -> int:
    row = span.row + index
    start = row // ROWS_PER_TILE * TILE_BYTES
    return _feature(span.image.pixels[start : start + TILE_BYTES], row % ROWS_PER_TILE)


def _feature(tile: bytes, row: int) -> int:
    return 1000 + int.from_bytes(sha256(tile + bytes([row])).digest()[:4])


class _Pixels:
    """An image in a slot."""

    def __init__(self, first_row: int, digest: bytes, pixels: bytes) -> None:
        self.first_row, self.digest, self.pixels = first_row, digest, pixels


class FakeImages:
    """Slots and rows; raises AssertionError if the router breaks a rule."""

    def __init__(self, *, num_rows: int = 0, num_slots: int = 0, mask: Mask = Mask.CAUSAL) -> None:
        """Without rows the shard reads only text."""
        self.num_rows, self.num_slots, self.mask = num_rows, num_slots, mask
        self.slots: dict[int, _Pixels] = {}
        self.rows: dict[int, int | None] = {}
        """The feature in each row that has been encoded; None if it is not finite."""
        self.encoded: list[tuple[bytes, int]] = []
        """Digests and tiles, in the order in which they were encoded."""
        self.begun: dict[int, tuple[int, int]] = {}
        """(tile, layers that have run) by slot, of tiles that are not complete."""
        self.num_puts = 0
        self.errors: dict[bytes, str] = {}
        """Answers to PutImage by digest."""
        self.not_finite: set[bytes] = set()
        """Digests of images whose features are not finite."""

    def begin(self) -> None:
        """Begin an epoch, without pixels and features."""
        self.slots.clear()
        self.begun.clear()
        self.rows.clear()

    def put(self, requests: Sequence[pb.PutImageRequest]) -> str | None:
        """Put an image into its slot; return why not."""
        first = requests[0]
        self.num_puts += 1
        if first.digest in self.errors:
            return self.errors[first.digest]
        pixels = b"".join(request.pixels for request in requests)
        assert 0 <= first.image_slot < self.num_slots, "an unknown image slot"
        assert first.image_slot not in self.slots, "an image slot that is not free"
        assert (first.height, first.width) == (EDGE, EDGE), "tiles of another size"
        assert len(pixels) == first.num_tiles * TILE_BYTES, (
            "more or fewer pixels than the tiles have"
        )
        end = first.first_row + first.num_tiles * ROWS_PER_TILE
        assert end <= self.num_rows, "rows that there are not"
        self.slots[first.image_slot] = _Pixels(first.first_row, first.digest, pixels)
        return None

    def change(self, change: pb.BatchChange) -> None:
        for slot in change.freed_images:
            del self.slots[slot]
            self.begun.pop(slot, None)

    def encode(self, step: pb.Encode, response: pb.StepResponse) -> None:
        """Run layers, and fill the rows of tiles after the last one."""
        for slot, tile, count in zip(step.image_slots, step.units, step.layers, strict=True):
            image = self.slots[slot]
            begun, num_done = self.begun.pop(slot, (tile, 0))
            assert begun == tile, "a tile before the last one is complete"
            assert 0 < count <= NUM_LAYERS - num_done, "layers that there are not"
            if num_done + count < NUM_LAYERS:
                self.begun[slot] = tile, num_done + count
                continue
            self.encoded.append((image.digest, tile))
            is_finite = image.digest not in self.not_finite
            pixels = image.pixels[tile * TILE_BYTES : (tile + 1) * TILE_BYTES]
            assert len(pixels) == TILE_BYTES, "a tile that the image has not"
            for row in range(ROWS_PER_TILE):
                number = image.first_row + tile * ROWS_PER_TILE + row
                self.rows[number] = _feature(pixels, row) if is_finite else None
            if not is_finite:
                response.failed_images.append(slot)

    def check_end(self, sequence: pb.Sequence, end: int) -> None:
        """Check that a chunk may end before position `end`."""
        num_prompt = len(sequence.input_ids) - sequence.generated_tokens
        spans = [(span.position, span.position + span.tokens) for span in sequence.images]
        uncut = {Mask.CAUSAL: [], Mask.IMAGE: spans, Mask.PROMPT: [(0, num_prompt)]}
        for position, last in uncut[self.mask]:
            assert not position < end < last, "a chunk ends before tokens that its own ones see"

    def token_at(self, sequence: pb.Sequence, position: int, token_id: int) -> int:
        """Return what stands at a position of a prompt: a feature, or the token."""
        for span in sequence.images:
            if span.position <= position < span.position + span.tokens:
                assert token_id == IMAGE_TOKEN_ID, "a feature in the place of a text's token"
                row = span.first_row + position - span.position
                assert row in self.rows, f"row {row} is read before it is encoded"
                feature = self.rows[row]
                assert feature is not None, "features that are not finite"
                return feature
        return token_id
