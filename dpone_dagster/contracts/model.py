"""The closed base of every document: each field listed once; schema, validation and digest derive from it."""

import json
from typing import Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticSerializationError, to_jsonable_python

from dpone_dagster.contracts.canonical import canonical_json, refuse_foreign_keys, sha256_of
from dpone_dagster.errors import DponeError


class ClosedModel(BaseModel):
    """A frozen model that refuses unknown fields and never converts a value from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate JSON text, or JSON-like data such as a YAML loader returns.

        Raises:
            DponeError: DPONE_CONTRACT_INVALID, naming the model, the field and the kind of fault.
        """
        return cls._validate(_json_value(cls, data))

    @classmethod
    def _validate(cls, value: Any, *, context: dict[str, Any] | None = None) -> Self:
        # Always through JSON: pydantic's strict mode takes lists for tuples and text for dates only there.
        try:
            return cls.model_validate_json(canonical_json(value), context=context)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            _refuse(cls, ".".join(str(part) for part in first["loc"]), first["msg"])

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form: aliases, absent optionals left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=False, exclude_none=True)


class Document(ClosedModel):
    """A closed model that carries the digest of itself in one of its own fields.

    Class attributes:
        SCHEMA: the versioned name in the JSON field ``schema``.
        DIGEST: the name of the field that holds the document's own digest.
        DERIVED: further digest fields that follow from the others; ``derive`` computes them.
    """

    SCHEMA: ClassVar[str]
    DIGEST: ClassVar[str]
    DERIVED: ClassVar[tuple[str, ...]] = ()

    schema_: str = Field(alias="schema")  # ``schema`` itself is an attribute of pydantic's base class

    @classmethod
    def seal(cls, **fields: Any) -> Self:
        """Build a document from its other fields and fill in schema, derived digests and its own digest.

        Args:
            fields: JSON-like values or closed models; None stands for an absent optional.

        Raises:
            DponeError: DPONE_CONTRACT_INVALID as for ``parse``, and for a field that is computed here.
        """
        computed = (*cls.DERIVED, cls.DIGEST)
        for name in ("schema", *computed):
            if name in fields:
                _refuse(cls, name, "The field is computed, not given")
        given = _json_value(cls, {name: value for name, value in fields.items() if value is not None})
        blank = dict.fromkeys(computed, "sha256:" + "0" * 64)
        draft = cls._validate({"schema": cls.SCHEMA, **given, **blank}, context={"unsealed": True})
        return draft.model_copy(update=draft.digests())

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate JSON text or JSON-like data as a sealed document.

        Raises:
            DponeError: DPONE_DIGEST_MISMATCH when a digest that the document carries is not the recomputed
                one; DPONE_CONTRACT_INVALID for everything else, a null in place of an absent field included.
        """
        given = _json_value(cls, data)
        document = cls._validate(given, context={"unsealed": True})
        # Whatever validation has let pass in another form (null, 0 for false) is not this document.
        if path := _first_difference(given, document.as_json()):
            _refuse(cls, path, "Input should be in its one canonical form")
        return document._check_digests()

    @property
    def sha256(self) -> str:
        """The digest that the document carries."""
        value: str = getattr(self, self.DIGEST)
        return value

    def recompute(self) -> str:
        """Return the digest over the document without its own digest field."""
        return sha256_of({k: v for k, v in self.as_json().items() if k != self.DIGEST})

    def digests(self) -> dict[str, str]:
        """Recompute every digest that follows from the document's other fields, its own one last."""
        body = {k: v for k, v in self.as_json().items() if k != self.DIGEST and k not in self.DERIVED}
        derived = self.derive(body)
        return {**derived, self.DIGEST: sha256_of({**body, **derived})}

    @classmethod
    def derive(cls, body: dict[str, Any]) -> dict[str, str]:
        """Compute the ``DERIVED`` digests from the JSON form without them and without the own digest."""
        return {}

    @model_validator(mode="after")
    def _names_itself_truly(self, info: ValidationInfo) -> Self:
        if self.schema_ != self.SCHEMA:
            raise ValueError(f"schema should be {self.SCHEMA}")
        return self if (info.context or {}).get("unsealed") else self._check_digests()

    def _check_digests(self) -> Self:
        for name, recomputed in self.digests().items():
            if getattr(self, name) != recomputed:
                raise DponeError(
                    "DPONE_DIGEST_MISMATCH",
                    f"{type(self).__name__}.{name} is not the digest of the document's other fields.",
                    field=name,
                )
        return self


def _refuse(model: type[BaseModel], field: str, fault: str) -> NoReturn:
    field = field or "(document)"
    raise DponeError("DPONE_CONTRACT_INVALID", f"{model.__name__}.{field}: {fault}.", field=field) from None


def _json_value(model: type[BaseModel], data: Any) -> Any:
    """Return plain JSON data; refuse what JSON or a closed document does not have."""
    try:
        if isinstance(data, str | bytes):
            value = json.loads(data, object_pairs_hook=_unique_keys)
        else:
            refuse_foreign_keys(data)
            value = to_jsonable_python(data, by_alias=True, exclude_none=True, inf_nan_mode="constants")
        canonical_json(value)
    except (ValueError, TypeError, RecursionError, PydanticSerializationError):
        # The parser's own message may quote the text.
        _refuse(model, "", "Input should be JSON with each key once, without NaN or infinities")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A repeated key would be dropped silently, and the digest would cover only the last one.
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


_ABSENT = object()


def _first_difference(given: Any, kept: Any, path: str = "") -> str:
    """Return the dotted path of the first place where two JSON values differ in value or type, or ''."""
    if isinstance(given, list) and isinstance(kept, list):
        given, kept = dict(enumerate(given)), dict(enumerate(kept))
    if isinstance(given, dict) and isinstance(kept, dict):
        for key in sorted(given.keys() | kept.keys()):
            inner = f"{path}.{key}" if path else str(key)
            if found := _first_difference(given.get(key, _ABSENT), kept.get(key, _ABSENT), inner):
                return found
        return ""
    return "" if type(given) is type(kept) and given == kept else path or "(document)"
