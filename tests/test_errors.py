"""Every refusal is listed once, explains itself, and is used."""

import ast
import json
import re

import product_source as product
import pytest

from dpone_dagster.errors import CODES, DponeError

TOKEN = re.compile(r"DPONE_[A-Z0-9]+(?:_[A-Z0-9]+)*")
# Names of environment variables share the prefix.
ENVIRONMENT = re.compile(r"DPONE_(DEBUG|HOME|FAULT|PROFILE|SQL_[A-Z_]+)")
UNUSED: frozenset[str] = frozenset()  # codes that are listed ahead of their use; keep this short


def names_in_python() -> dict[str, set[str]]:
    """Every string that is a code and nothing else: name -> files."""
    found: dict[str, set[str]] = {}
    for path, tree in product.modules():
        if path.name == "errors.py" and path.parent.name == "dpone_dagster":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and TOKEN.fullmatch(node.value):
                found.setdefault(node.value, set()).add(str(path))
    return found


def names_in_sql() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in product.files(".sql"):
        for name in TOKEN.findall(path.read_text("utf-8")):
            found.setdefault(name, set()).add(str(path.relative_to(product.ROOT)))
    return found


def test_every_code_in_the_tree_is_listed() -> None:
    found = names_in_python() | names_in_sql()
    assert len(found) > 20
    unlisted = {n: sorted(files) for n, files in found.items() if n not in CODES and not ENVIRONMENT.fullmatch(n)}
    assert unlisted == {}


def test_every_refusal_is_raised_by_a_literal_or_a_listed_name() -> None:
    raised = 0
    for path, tree in product.modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DponeError":
                raised += 1
                assert node.args, f"{path}:{node.lineno} passes no code"
                assert not isinstance(node.args[0], ast.JoinedStr), f"{path}:{node.lineno} composes a code"
    assert raised > 20


def test_every_listed_code_is_used() -> None:
    if not product.is_whole():
        pytest.skip("the tree is not whole: a composition root is missing")
    used = names_in_python().keys() | names_in_sql().keys()
    assert CODES.keys() - used == UNUSED


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_every_code_says_what_to_do(code) -> None:  # type: ignore[no-untyped-def]
    assert TOKEN.fullmatch(code.code)
    for sentence in (code.meaning, code.next_step):
        assert sentence[0].isupper() or sentence.startswith(("`", "dbt "))
        assert sentence.endswith(".")
        assert "\n" not in sentence


def test_a_code_is_listed_once() -> None:
    listed = [
        node.args[0].value
        for path, tree in product.modules()
        if str(path) == "dpone_dagster/errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "_code"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert sorted(listed) == sorted(CODES)


def test_a_refusal_as_json() -> None:
    error = DponeError("DPONE_SCOPE_NOT_A_DAY", "The key is not a day.", field="partition")
    assert json.loads(json.dumps(error.as_json())) == {
        "error_code": "DPONE_SCOPE_NOT_A_DAY",
        "message": "The key is not a day.",
        "next_step": "Give the day as YYYY-MM-DD; it means midnight to midnight UTC.",
        "details": {"field": "partition"},
    }
    assert str(error).startswith("DPONE_SCOPE_NOT_A_DAY: The key is not a day. Next: ")
    own = DponeError("DPONE_SCOPE_NOT_A_DAY", "No.", next_step="Do this.")
    assert own.as_json()["next_step"] == "Do this."
    assert "details" not in own.as_json()


def test_an_unlisted_code_cannot_be_raised() -> None:
    with pytest.raises(KeyError):
        DponeError("DPONE_" + "SURPRISE", "Boo.")
