"""The closed base: strictness, sealing, and the refusals that every document shares."""

import hashlib
from datetime import date
from typing import Any, ClassVar

import pytest

from dpone_dagster.contracts.model import ClosedModel, Document
from dpone_dagster.errors import DponeError


class Part(ClosedModel):
    name: str
    size: int | None = None


class Note(Document):
    SCHEMA: ClassVar[str] = "test.note.v1"
    DIGEST: ClassVar[str] = "note_sha256"

    title: str
    done: bool
    parts: tuple[Part, ...]
    remark: str | None = None
    numbers: dict[str, int | None] | None = None
    note_sha256: str


class Dated(ClosedModel):
    on: date
    tags: tuple[str, ...] = ()


TEXT = '{"done":false,"numbers":{"n":null},"parts":[{"name":"a"}],"schema":"test.note.v1","title":"t"}'
DIGEST = "sha256:" + hashlib.sha256(TEXT.encode()).hexdigest()
SEALED = TEXT.replace('"numbers"', f'"note_sha256":"{DIGEST}","numbers"')


def refusal(call: Any, *args: Any, **kwargs: Any) -> DponeError:
    with pytest.raises(DponeError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_seal_computes_the_digest_over_everything_else() -> None:
    note = Note.seal(title="t", done=False, parts=[Part(name="a")], remark=None, numbers={"n": None})
    assert note.sha256 == note.recompute() == DIGEST
    assert Note.parse(SEALED) == Note.parse(SEALED.encode()) == Note.parse(note.as_json()) == note
    # An absent optional is left out; a null inside a mapping is a value and stays.
    assert note.as_json()["parts"] == [{"name": "a"}]
    assert note.as_json()["numbers"] == {"n": None}


def test_seal_refuses_computed_missing_and_wrong_fields() -> None:
    good = {"title": "t", "done": False, "parts": []}
    for extra in ({"note_sha256": DIGEST}, {"schema": "test.note.v1"}, {"colour": "red"}, {"done": "no"}):
        error = refusal(Note.seal, **{**good, **extra})
        assert (error.code, error.details["field"]) == ("DPONE_CONTRACT_INVALID", next(iter(extra)))
    assert refusal(Note.seal, title="t", done=True).details["field"] == "parts"
    assert refusal(Note.seal, title=object(), done=True, parts=[]).code == "DPONE_CONTRACT_INVALID"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"done":false', '"done":0', "done"),
        ('"done":false', '"done":"false"', "done"),
        ('"title":"t"', '"title":1', "title"),
        ('"title":"t"', '"title":"t","remark":null', "remark"),
        ('"name":"a"', '"name":"a","size":null', "parts.0.size"),
        ('"name":"a"', '"name":"a","size":1.0', "parts.0.size"),
        ('"name":"a"', '"name":"a","colour":1', "parts.0.colour"),
        ('"title":"t"', '"title":"t","colour":1', "colour"),
        ("test.note.v1", "test.note.v2", "(document)"),
        ('"title":"t"', '"title":"t","title":"t"', "(document)"),
        ('"n":null', '"n":NaN', "(document)"),
        ('"title":"t"', '"title":"\\ud800"', "(document)"),
        ("}]", "", "(document)"),
    ],
)
def test_parse_refuses_every_other_form(old: str, new: str, field: str) -> None:
    assert old in SEALED
    error = refusal(Note.parse, SEALED.replace(old, new))
    assert (error.code, error.details["field"]) == ("DPONE_CONTRACT_INVALID", field)


@pytest.mark.parametrize("data", ["[]", "1", "", "null", [], None, {1: 2}, {"title": float("inf")}])
def test_parse_refuses_what_is_no_object(data: Any) -> None:
    assert refusal(Note.parse, data).code == "DPONE_CONTRACT_INVALID"


@pytest.mark.parametrize(("old", "new"), [('"title":"t"', '"title":"u"'), ("false", "true"), ('"a"', '"b"')])
def test_parse_refuses_a_digest_of_something_else(old: str, new: str) -> None:
    error = refusal(Note.parse, SEALED.replace(old, new))
    assert (error.code, error.details["field"]) == ("DPONE_DIGEST_MISMATCH", "note_sha256")


def test_a_document_cannot_be_built_or_changed_behind_its_digest() -> None:
    fields = {"schema": "test.note.v1", "title": "t", "done": False, "parts": ()}
    assert refusal(Note, **fields, note_sha256=DIGEST).code == "DPONE_DIGEST_MISMATCH"
    with pytest.raises(ValueError, match="frozen"):
        Note.parse(SEALED).title = "u"  # type: ignore[misc]


def test_refusals_keep_values_out() -> None:
    secret = "correct-horse-battery"  # a value, not a field
    for text in (SEALED.replace("false", f'"{secret}"'), SEALED + secret, SEALED.replace("note.v1", secret)):
        error = refusal(Note.parse, text)
        assert secret not in str(error) + repr(error.as_json())
        assert error.__cause__ is None
        assert error.__suppress_context__


def test_declarations_take_what_a_yaml_loader_returns() -> None:
    assert Dated.parse({"on": "2024-02-29", "tags": ["a"]}) == Dated(on=date(2024, 2, 29), tags=("a",))
    assert Dated.parse({"on": date(2024, 2, 29), "tags": ("a",)}).on == date(2024, 2, 29)
    assert refusal(Dated.parse, {"on": "2024-02-30"}).details["field"] == "on"
