"""Random JSON Schemas of all supported keywords from a seed, and requests under them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Schema = dict[str, Any] | bool

NAMES = ("a", "b", "key", "näme", 'q"u', "x y", "", "$ref")
PATTERNS = (
    "^[a-c]{2,4}$",
    "^x",
    "y$",
    "[0-9]",
    "^(ab|cd)*$",
    "^[^aeiou]*$",
    "a.c",
    r"^\d{3}-\d{4}$",
)
NAME_PATTERNS = ("^x-", "^[0-9]+$", "_id$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -7,
    2.5,
    "",
    "a",
    "é\n",
    [],
    [1, "b"],
    {},
    {"a": None},
    "\\",
)
MAX_NEW_TOKENS = 200


class Schemas:
    """A generator of schemas."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(f"schemas/{seed}")

    def schema(self) -> dict[str, Any]:
        """The next schema; some refer to their own definitions."""
        rng = self._random
        names = [f"d{number}" for number in range(rng.choice((0, 0, 1, 2)))]
        schema = self._any(3, names)
        if isinstance(schema, bool):
            schema = {}
        if names:
            schema = {**schema, "$defs": {name: self._any(2, names) for name in names}}
        return schema

    def _any(self, depth: int, names: list[str]) -> Schema:
        rng = self._random
        if rng.random() < 0.03:
            return rng.random() < 0.7
        if names and rng.random() < 0.25:
            return {"$ref": f"#/$defs/{rng.choice(names)}"}
        makers: list[Callable[[], dict[str, Any]]] = [
            self._string,
            self._number,
            self._constants,
            self._plain,
        ]
        if depth:
            nested = [self._object, self._object, self._array, self._choice, self._all]
            makers += [partial(maker, depth - 1, names) for maker in nested]
        made: dict[str, Any] = rng.choice(makers)()
        if rng.random() < 0.1:
            made["description"] = "what it is"
        return made

    def _plain(self) -> dict[str, Any]:
        kinds = ("null", "boolean", "integer", "number", "string")
        if self._random.random() < 0.5:
            return {"type": self._random.choice(kinds)}
        return {"type": self._random.sample(kinds, 2)}

    def _constants(self) -> dict[str, Any]:
        rng = self._random
        if rng.random() < 0.4:
            return {"const": rng.choice(VALUES)}
        return {"enum": rng.sample(VALUES, rng.randint(1, 4))}

    def _string(self) -> dict[str, Any]:
        rng = self._random
        made: dict[str, Any] = {"type": "string"}
        kind = rng.random()
        if kind < 0.3:
            made["pattern"] = rng.choice(PATTERNS)
        elif kind < 0.5:
            made["format"] = rng.choice(FORMATS)
        if kind >= 0.3 or rng.random() < 0.3:
            if rng.random() < 0.4 and "format" not in made:
                made["minLength"] = rng.randint(0, 4)
            if rng.random() < 0.4 and "format" not in made:
                made["maxLength"] = rng.randint(2, 12)
        return made

    def _number(self) -> dict[str, Any]:
        rng = self._random
        kind = rng.choice(("integer", "number"))
        made: dict[str, Any] = {"type": kind}
        low = rng.randint(-200, 200) if kind == "integer" else round(rng.uniform(-9, 9), 2)
        if rng.random() < 0.5:
            made[rng.choice(("minimum", "exclusiveMinimum"))] = low
        if rng.random() < 0.5:
            made[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randint(1, 300)
        if rng.random() < 0.25:
            made["multipleOf"] = rng.choice(
                (1, 2, 3, 7, 10) if kind == "integer" else (0.5, 0.01, 3)
            )
        return made

    def _object(self, depth: int, names: list[str]) -> dict[str, Any]:
        rng = self._random
        listed = rng.sample(NAMES, rng.randint(0, 4))
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth, names) for name in listed},
        }
        if rng.random() < 0.7:
            made["required"] = rng.sample(listed, rng.randint(0, len(listed)))
        if rng.random() < 0.15:
            made["required"] = [*made.get("required", ()), "extra"]
        if rng.random() < 0.2:
            made["patternProperties"] = {rng.choice(NAME_PATTERNS): self._any(depth, names)}
        if rng.random() < 0.6:
            made["additionalProperties"] = rng.random() < 0.3 and self._any(depth, names)
        if rng.random() < 0.1:
            made["maxProperties"] = rng.randint(0, 5)
        if rng.random() < 0.1:
            made["minProperties"] = rng.randint(0, 2)
        return made

    def _array(self, depth: int, names: list[str]) -> dict[str, Any]:
        rng = self._random
        made: dict[str, Any] = {"type": "array"}
        if rng.random() < 0.3:
            made["prefixItems"] = [self._any(depth, names) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.8:
            made["items"] = self._any(depth, names)
        if rng.random() < 0.4:
            made["minItems"] = rng.randint(0, 3)
        if rng.random() < 0.4:
            made["maxItems"] = rng.randint(0, 5)
        return made

    def _choice(self, depth: int, names: list[str]) -> dict[str, Any]:
        rng = self._random
        if rng.random() < 0.7:
            return {"anyOf": [self._any(depth, names) for _ in range(rng.randint(1, 3))]}
        kinds = rng.sample(("null", "boolean", "number", "string", "array"), rng.randint(1, 3))
        return {"oneOf": [{"type": kind} for kind in kinds]}

    def _all(self, depth: int, names: list[str]) -> dict[str, Any]:
        maker = self._random.choice((self._string, self._number))
        if self._random.random() < 0.5:
            return {"allOf": [maker(), maker()]}
        return {"allOf": [self._object(depth, names) for _ in range(2)]}


def bodies(num: int, seed: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Schemas, and requests that sample under them at high temperatures."""
    schemas, rng = Schemas(seed), random.Random(seed)
    for number in range(num):
        schema = schemas.schema()
        parameters = {
            "max_new_tokens": MAX_NEW_TOKENS,
            "details": True,
            "do_sample": True,
            "temperature": rng.choice((0.7, 1.0, 3.0)),
            "seed": number,
            "grammar": {"type": "json_schema", "value": {"name": "random", "schema": schema}},
        }
        yield schema, {"inputs": f"Number {number}:", "parameters": parameters}
