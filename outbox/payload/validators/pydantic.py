"""pydantic: models, dataclasses, TypedDicts and other annotated types.

Fields have one name on the wire: their alias. `jsonable` writes it, and the JSON Schema
has it. What was written by field names is read, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.payload.jsonable import is_dumped
from pillarbox.outbox.payload.schema_registry import PayloadError

_NO_SCHEMA: Final = {"config", "default", "expected", "metadata", "serialization"}
"""Entries of a core schema that contain no schemas of fields, but may look like one."""


class PydanticValidator:
    """A type that pydantic can validate.

    Raises:
        ConfigError: pydantic can't validate the type, or a field of it is read by
            another name than it is written.
    """

    def __init__(self, type_: Any) -> None:
        self._type = type_
        self._names: set[object] = set()
        self._is_checked = self._has_aliases = False
        try:
            self._adapter = TypeAdapter(type_)
        except PydanticUserError as error:
            raise ConfigError(
                f"schema {type_!r}: {error.message}; annotate its fields with types "
                "that pydantic supports"
            ) from error
        if self._adapter.pydantic_complete:  # no class in it is defined later
            self._check_names()

    def json_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the type."""
        self._check_names()
        return self._adapter.json_schema(by_alias=True)

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the type."""
        return self._load(payload, by_name=True)

    def check(self, payload: bytes) -> None:
        """Refuse JSON that doesn't fit, or has names where aliases belong."""
        loaded = self._load(payload, by_name=False)
        if self._has_aliases and self._dump(loaded) != self._dump(self.load(payload)):
            raise PayloadError(
                "a field isn't named by its alias; pass the model itself, or"
                " model_dump(by_alias=True)"
            )

    def _load(self, payload: bytes, *, by_name: bool) -> Any:
        self._check_names()
        try:
            return self._adapter.validate_json(payload, by_alias=True, by_name=by_name)
        except ValidationError as error:
            first, *others = error.errors(
                include_input=False, include_url=False, include_context=False
            )
            known = self._names  # any others are keys of the payload
            path = (p if p in known or type(p) is int else "…" for p in first["loc"])
            where = ".".join(("$", *map(str, path)))
            more = f" (and {len(others)} more)" if others else ""
            raise PayloadError(f"at {where}: {first['type']}{more}") from None

    def _dump(self, value: Any) -> Any:
        return self._adapter.dump_python(
            value,
            mode="json",
            exclude_unset=True,
            warnings=False,
            fallback=lambda _: None,
        )

    def _check_names(self) -> None:
        if self._is_checked:
            return
        for fields, by_alias in _fields_in(self._adapter.core_schema, {}, set()):
            read = {it: fields[it].get("validation_alias") or it for it in fields}
            for name, alias in read.items():
                written = fields[name].get("serialization_alias") or name
                written = written if by_alias else name
                if alias != written:
                    problem = f"is written as {written!r} and read as {alias!r}"
                elif [*fields, *read.values()].count(alias) > 1 + (alias == name):
                    problem = f"shares the alias {alias!r} with another field"
                else:
                    self._has_aliases |= alias != name
                    self._names |= {name, alias}
                    continue
                raise ConfigError(
                    f"schema {self._type!r}: its field {name!r} {problem}; give it one "
                    "alias=… of its own, in a model or a dataclass of pydantic"
                )
        self._is_checked = True


def _fields_in(
    node: Any,
    refs: dict[str, Any],
    seen: set[tuple[int, bool]],
    *,
    dumped: bool = False,
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the fields of each class in a core schema, and whether pydantic dumps them.

    It dumps its own classes, and what is in them. `jsonable` writes the others.
    """
    if isinstance(node, list | tuple):
        for inner in node:
            yield from _fields_in(inner, refs, seen, dumped=dumped)
    if not isinstance(node, Mapping):
        return
    refs.update((it["ref"], it) for it in node.get("definitions", ()))
    node = refs.get(node.get("schema_ref", ""), node)
    if (id(node), dumped) in seen:
        return
    seen.add((id(node), dumped))
    dumped = dumped or is_dumped(node.get("cls", object))
    fields = node.get("fields", {})
    if node.get("type") == "dataclass-args":
        fields = {field["name"]: field for field in fields}
    if isinstance(fields, Mapping):
        yield dict(fields), dumped
    for key in node.keys() - _NO_SCHEMA - {"definitions"}:
        yield from _fields_in(node[key], refs, seen, dumped=dumped)
