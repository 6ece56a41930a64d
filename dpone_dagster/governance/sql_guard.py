"""Whether a SQL body only reads, decided over every statement of it; what cannot be decided counts as mutating.

Two looks, and both must come to "reads". A lexer of our own knows the dialect's comments, strings, quoted names and
heredocs; it splits the statements and refuses everything that engines read differently. sqlglot then parses each
statement, without its comments and with harmless text in its strings, and its whole tree is walked.

What no text shows stays unseen: functions inside views, triggers, row policies, user operators and table engines.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from dpone_dagster.errors import DponeError
from dpone_dagster.governance import sql_names as names

DIALECTS = ("tsql", "postgres", "clickhouse")
MAX_DEPTH = 100  # of brackets; the parser recurses

# It warns about what it cannot parse, quoting the text.
logging.getLogger("sqlglot").setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True, kw_only=True)
class SqlAnalysis:
    """What a body does.

    Attributes:
        statements: how many there are.
        mutates: whether one of them may change something.
        reasons: ``statement N: why`` for each that may; keywords of ours, never text of the body.
        maintenance: whether each that may is plain OPTIMIZE or ANALYZE, which keeps the rows as they are.
        controls_transaction: whether one of them begins or ends a transaction by itself.
    """

    statements: int
    mutates: bool
    reasons: tuple[str, ...]
    maintenance: bool = False
    controls_transaction: bool = False


def analyse(sql: str, *, dialect: str) -> SqlAnalysis:
    """Decide whether a body may change something.

    Args:
        dialect: ``tsql``, ``postgres`` or ``clickhouse``.

    Raises:
        DponeError: DPONE_SQL_EMPTY.
    """
    try:
        pieces = _pieces(sql, dialect)
    except _UnreadableError as error:
        return SqlAnalysis(statements=1, mutates=True, reasons=(f"statement 1: cannot be read ({error})",))
    if not pieces:
        raise _empty()
    found = [(number, _reason(piece, dialect), piece) for number, piece in enumerate(pieces, 1)]
    mutating = [(number, reason, piece) for number, reason, piece in found if reason is not None]
    return SqlAnalysis(
        statements=len(pieces),
        mutates=bool(mutating),
        reasons=tuple(f"statement {number}: {reason}" for number, reason, _ in mutating),
        maintenance=bool(mutating) and all(_is_maintenance(piece, dialect) for _, _, piece in mutating),
        controls_transaction=any(_controls_transaction(piece, dialect) for piece in pieces),
    )


def require_reading(sql: str, dialect: str, *, relation: bool = False) -> str:
    """Return the one reading statement of a body, without a semicolon and the comments round it.

    Args:
        relation: whether ``{{ relation }}`` stands for a table; inside strings, names and comments it is refused.

    Raises:
        DponeError: DPONE_SQL_NOT_READING, DPONE_SQL_EMPTY.
    """
    judged = sql
    if relation:
        # Replaced by a plain name, it would be judged as harmless inside a string too, where the real text, which
        # has quotes of its own, would break out.
        if _PLACEHOLDER in sql.lower():
            raise _not_reading("it uses a name that is the platform's")
        judged, wanted = re.subn(r"\{\{\s*relation\s*\}\}", f" {_PLACEHOLDER} ", sql)
        try:
            tokens = [token for piece in _pieces(judged, dialect) for token in piece]
        except _UnreadableError as error:
            raise _not_reading(f"it cannot be read ({error})") from None
        if sum(token.kind == "word" and token.value == _PLACEHOLDER for token in tokens) != wanted:
            raise _not_reading("{{ relation }} stands inside a string, a quoted name or a comment")
    analysis = analyse(judged, dialect=dialect)
    if analysis.mutates:
        raise _not_reading("; ".join(analysis.reasons))
    if analysis.statements != 1:
        raise _not_reading(f"it has {analysis.statements} statements, and one is needed")
    text = split(judged, dialect)[0]
    return text.replace(f" {_PLACEHOLDER} ", "{{ relation }}").replace(_PLACEHOLDER, "{{ relation }}")


def split(sql: str, dialect: str) -> tuple[str, ...]:
    """Return the statements of a body, each without its semicolon and the comments round it.

    It splits at the body's own semicolons, not at those in strings, names, comments or bodies of routines.

    Raises:
        DponeError: DPONE_SQL_UNREADABLE, DPONE_SQL_EMPTY.
    """
    try:
        pieces = _pieces(sql, dialect)
    except _UnreadableError as error:
        raise DponeError("DPONE_SQL_UNREADABLE", f"The SQL cannot be split into its statements: {error}.") from None
    if not pieces:
        raise _empty()
    for piece in pieces:
        words = [token.value for token in piece if token.kind == "word"]
        if dialect == "clickhouse" and words[:1] == ["insert"] and "format" in words and "select" not in words:
            # Its data follows in the text, and semicolons in data are data.
            raise DponeError("DPONE_SQL_UNREADABLE", "An INSERT with FORMAT has its data in the text; use VALUES.")
    return tuple(sql[piece[0].start : piece[-1].end] for piece in pieces)


def _empty() -> DponeError:
    return DponeError("DPONE_SQL_EMPTY", "The SQL body has no statement.")


def _not_reading(why: str) -> DponeError:
    return DponeError("DPONE_SQL_NOT_READING", f"The SQL should be one reading statement: {why}.")


# ----------------------------------------------------------------------------------------------------- lexer

_PLACEHOLDER = "dpone_relation_placeholder"
_ODD_NAME = "dpone_odd_name"


class _UnreadableError(Exception):
    """The lexer will not vouch for how an engine reads the body."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # word, quoted, string, number, symbol
    value: str  # word: lower-case; quoted: the name; string: harmless text; else the text
    safe: str  # what the parser is given
    start: int
    end: int


_GAP = re.compile(r"[ \t\n\r\v\f]+")
_NUMBER = re.compile(r"0[xX][0-9A-Fa-f]+|0b[01]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DOLLAR = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*)?\$")
_PLAIN_TEXT = re.compile(r"[\w .:/$%+\-]*", re.ASCII)
_PLAIN_NAME = re.compile(r"[^\W\d][\w ]*")
_SYMBOLS = frozenset("()[]{},;.:+-*/%<>=!~^&|?@#")


def _lex(sql: str, dialect: str) -> Iterator[_Token]:
    if dialect not in DIALECTS:
        raise KeyError(dialect)
    if re.search(r"\r(?!\n)|[\x00-\x08\x0e-\x1f\x7f\x85\u2028\u2029]", sql):
        # Some engines end a comment at these, others do not.
        raise _UnreadableError("a control character or a lone carriage return")
    at, size, depth = 0, len(sql), 0
    while at < size:
        char = sql[at]
        start = at
        if gap := _GAP.match(sql, at):
            at = gap.end()
        elif sql.startswith("--", at):
            newline = sql.find("\n", at)
            at = size if newline < 0 else newline
        elif sql.startswith("/*", at):
            at = _after_comment(sql, at, nests=dialect != "clickhouse")
        elif char == "'":
            at, text = _after_quote(sql, at, "'", backslash=dialect == "clickhouse")
            if dialect == "postgres" and "\\'" in sql[start:at]:
                raise _UnreadableError("a backslash before a quote, which a setting decides about")
            yield _string(text, start, at)
        elif char in '"`' and not (char == "`" and dialect != "clickhouse"):
            at, text = _after_quote(sql, at, char, backslash=dialect == "clickhouse")
            yield _name(text, start, at)
        elif char == "[" and dialect == "tsql":
            at, text = _after_quote(sql, at, "]", backslash=False)
            yield _name(text, start, at)
        elif char == "$" and dialect != "tsql":
            tag = _DOLLAR.match(sql, at)
            close = sql.find(tag[0], tag.end()) if tag else -1
            if tag is None or close < 0:
                raise _UnreadableError("a dollar sign")
            at = close + len(tag[0])
            yield _string(sql[tag.end() : close], start, at)
        elif number := _NUMBER.match(sql, at):
            at = number.end()
            if at < size and _in_word(sql[at]):
                raise _UnreadableError("a number that runs into a word")
            yield _Token("number", number[0], number[0], start, at)
        elif _in_word(char) or (dialect == "tsql" and char in "@#$"):
            while at < size and (_in_word(sql[at]) or sql[at] == "$" or (dialect == "tsql" and sql[at] in "@#")):
                at += 1
            word = sql[start:at]
            if dialect == "postgres" and word in ("e", "E") and sql.startswith("'", at):
                at, text = _after_quote(sql, at, "'", backslash=True)
                yield _string(text, start, at)
            elif dialect != "clickhouse" and word in ("n", "N") and sql.startswith("'", at):
                at, text = _after_quote(sql, at, "'", backslash=False)
                if dialect == "postgres" and "\\'" in sql[start:at]:
                    raise _UnreadableError("a backslash before a quote, which a setting decides about")
                yield _string(text, start, at)
            else:
                yield _Token("word", word.lower(), word, start, at)
        elif char in _SYMBOLS and not (char == "#" and dialect == "clickhouse"):
            depth += (char in "([{") - (char in ")]}")
            if depth > MAX_DEPTH:
                raise _UnreadableError("brackets too deep")
            at += 1
            yield _Token("symbol", char, char, start, at)
        else:
            raise _UnreadableError("a character that means different things to different engines")


def _in_word(char: str) -> bool:
    return char == "_" or char.isalnum()


def _after_comment(sql: str, at: int, *, nests: bool) -> int:
    if sql.startswith("/*!", at):
        raise _UnreadableError("an executable comment")
    depth = 0
    for mark in re.finditer(r"/\*|\*/", sql[at:]):
        if mark[0] == "/*" and depth and not nests:
            raise _UnreadableError("a comment inside a comment")
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return at + mark.end()
    raise _UnreadableError("a comment without an end")


def _after_quote(sql: str, at: int, close: str, *, backslash: bool) -> tuple[int, str]:
    """Return the place behind the closing quote, and the raw text between."""
    begin = at = at + 1
    while at < len(sql):
        if backslash and sql[at] == "\\":
            at += 2
        elif sql[at] == close:
            if not sql.startswith(close, at + 1):
                return at + 1, sql[begin:at]
            at += 2
        else:
            at += 1
    raise _UnreadableError("a string or quoted name without an end")


def _string(text: str, start: int, end: int) -> _Token:
    # The parser reads some strings (types, intervals, JSON paths), so plain text stays what it is.
    safe = text if _PLAIN_TEXT.fullmatch(text) else "x"
    return _Token("string", safe, f"'{safe}'", start, end)


def _name(text: str, start: int, end: int) -> _Token:
    name = text if _PLAIN_NAME.fullmatch(text) else _ODD_NAME
    return _Token("quoted", name, f'"{name}"', start, end)


def _pieces(sql: str, dialect: str) -> list[list[_Token]]:
    """Return the tokens of each statement."""
    pieces: list[list[_Token]] = [[]]
    body = 0  # how deep inside BEGIN ATOMIC .. END of a PostgreSQL routine, whose semicolons are its own
    tokens = list(_lex(sql, dialect))
    skip = -1
    for index, token in enumerate(tokens):
        if index <= skip:
            continue
        if dialect == "tsql" and (last := _batch_separator(sql, tokens, index)) is not None:
            pieces.append([])
            skip = last
            continue
        if token.kind == "symbol" and token.value == ";" and body == 0:
            pieces.append([])
            continue
        if dialect == "postgres" and token.kind == "word":
            body = _routine_depth(pieces[-1], token, body)
        pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def _batch_separator(sql: str, tokens: Sequence[_Token], index: int) -> int | None:
    """Return the last token of a GO that stands on a line of its own, with or without a count, else None."""
    if tokens[index].kind != "word" or tokens[index].value != "go":
        return None
    if index and "\n" not in sql[tokens[index - 1].end : tokens[index].start]:
        return None
    for last in (index, index + 1):
        if last == index + 1 and (last >= len(tokens) or tokens[last].kind != "number"):
            return None
        if last + 1 >= len(tokens) or "\n" in sql[tokens[last].end : tokens[last + 1].start]:
            return last
    return None


def _routine_depth(before: Sequence[_Token], token: _Token, depth: int) -> int:
    # As psql does it: only inside CREATE FUNCTION and CREATE PROCEDURE, which mutate in any case.
    head = [each.value for each in before[:4]]
    if head[:1] != ["create"] or not {"function", "procedure"} & set(head):
        return 0
    if token.value == "begin" or (token.value == "case" and depth):
        return depth + 1
    return max(depth - 1, 0) if token.value == "end" else depth


# ---------------------------------------------------------------------------------------------------- judging

_ROOTS = (exp.Select, exp.SetOperation, exp.Subquery, exp.Values)
_EFFECTS: dict[type[exp.Expr], str] = {
    exp.Insert: "INSERT",
    exp.Update: "UPDATE",
    exp.Delete: "DELETE",
    exp.Merge: "MERGE",
    exp.Create: "CREATE",
    exp.Drop: "DROP",
    exp.Alter: "ALTER",
    exp.TruncateTable: "TRUNCATE",
    exp.Into: "SELECT INTO",
    exp.Lock: "a locking clause",
    exp.Copy: "COPY",
    exp.Set: "SET",
    exp.Use: "USE",
    exp.Execute: "EXECUTE",
    exp.Kill: "KILL",
    exp.Detach: "DETACH",
    exp.Attach: "ATTACH",
    exp.NextValueFor: "NEXT VALUE FOR",
    exp.Operator: "an operator that is named by OPERATOR()",
    exp.DML: "a statement that writes",
    exp.DDL: "a statement that defines",
}
_WORDS = {"tsql": names.TSQL_WORDS, "postgres": names.POSTGRES_WORDS, "clickhouse": names.CLICKHOUSE_WORDS}


def _reason(tokens: Sequence[_Token], dialect: str) -> str | None:
    """Return why a statement may change something, or None for one that reads."""
    for token in tokens:
        if token.kind == "word" and token.value in _WORDS[dialect]:
            return f"{token.value.upper()} (quote it if it is a name)"
    try:
        parsed = sqlglot.parse(_render(tokens), read=dialect)
    except Exception:  # noqa: BLE001 - whatever stops the parser leaves the statement unjudged, so it counts
        return "it cannot be parsed"
    root = parsed[0] if len(parsed) == 1 else None
    if root is None:
        return "it cannot be parsed as one statement"
    if reason := _node_reason(root, dialect):
        return reason
    if not isinstance(root, _ROOTS):
        return "it is no query"
    if dialect == "postgres":
        return _postgres_call(tokens, root)
    if dialect == "clickhouse":
        return _clickhouse_call(tokens)
    return None


def _render(tokens: Sequence[_Token]) -> str:
    parts: list[str] = []
    end = tokens[0].start
    for token in tokens:
        if token.start > end:
            parts.append(" ")
        parts.append(token.safe)
        end = token.end
    return "".join(parts)


def _node_reason(root: exp.Expr, dialect: str) -> str | None:
    for node in root.walk():
        if not isinstance(node, exp.Query):
            if isinstance(node, exp.Command):
                word = str(node.this).upper()
                return word if word in names.COMMANDS else "a command that is not parsed"
            for kind, effect in _EFFECTS.items():
                if isinstance(node, kind):
                    return effect
        if dialect == "tsql" and isinstance(node, exp.Anonymous):
            name = str(node.this).lower()
            if isinstance(node.parent, exp.Dot) or name not in names.TSQL_FUNCTIONS:
                return "a function that is not known to be pure"
        if (
            dialect == "tsql"
            and isinstance(node, exp.Table)
            and isinstance(node.this, exp.Func)
            and node.args.get("db")
        ):
            return "a function that is not known to be pure"
        if dialect == "clickhouse" and isinstance(node, exp.Table) and isinstance(node.this, exp.Func):
            table = node.this
            name = str(table.this).lower() if isinstance(table, exp.Anonymous) else table.sql_name().lower()
            if name not in names.CLICKHOUSE_TABLES and not isinstance(
                table, exp.GenerateSeries | exp.ExplodingGenerateSeries
            ):
                return "a table function that is not known to stay inside the server"
    return None


def _calls(tokens: Sequence[_Token]) -> Iterator[tuple[int, _Token]]:
    """Yield what stands right before an opening parenthesis; every call of a function is among them."""
    for index, token in enumerate(tokens[:-1]):
        after = tokens[index + 1]
        if token.kind in ("word", "quoted") and after.kind == "symbol" and after.value == "(":
            yield index, token


def _postgres_call(tokens: Sequence[_Token], root: exp.Expr) -> str | None:
    # Aliases with a column list look like calls. Each is let through as often as the tree has it as an alias.
    aliases = Counter(
        alias.name.lower() for alias in root.find_all(exp.TableAlias) if alias.args.get("columns") and alias.name
    )
    for index, token in _calls(tokens):
        qualified = index >= 1 and tokens[index - 1].value == "." and tokens[index - 1].kind == "symbol"
        if qualified and not (index >= 2 and tokens[index - 2].value == "pg_catalog"):
            return "a function of a schema, which may change something"
        name = token.value
        if name in names.POSTGRES_FUNCTIONS or name in names.POSTGRES_PURE_VOLATILE:
            continue
        if token.kind == "word" and not qualified and _is_postgres_syntax(name, tokens[index - 1] if index else None):
            continue
        if not qualified and aliases[name.lower()] > 0:
            aliases[name.lower()] -= 1
            continue
        return "a function that is not known to be pure"
    return None


def _is_postgres_syntax(word: str, before: _Token | None) -> bool:
    if word in names.POSTGRES_SYNTAX:
        return True
    if before is None:
        return False
    if word in names.POSTGRES_INFIX:
        operand = before.kind != "symbol" or before.value in ")]"
        return operand and not (before.kind == "word" and before.value in names.POSTGRES_OPERAND_BEGINS)
    return before.kind != "quoted" and before.value in names.POSTGRES_SYNTAX_AFTER.get(word, ())


def _clickhouse_call(tokens: Sequence[_Token]) -> str | None:
    # COLUMNS(..) APPLY f and APPLY(f) call f for each column.
    applied = [
        next((after for after in tokens[index + 1 :] if after.value != "("), token)
        for index, token in enumerate(tokens)
        if token.kind == "word" and token.value == "apply"
    ]
    for token in (*(token for _, token in _calls(tokens)), *applied):
        name = token.value.lower()
        if name == _ODD_NAME:
            return "a function with an odd name"
        if name in names.CLICKHOUSE_EFFECTS:
            return f"the function {name}, which writes or reaches out of the server"
    return None


def _is_maintenance(tokens: Sequence[_Token], dialect: str) -> bool:
    """Whether a statement is one of a few that reorganise or measure and keep the rows."""
    words = [token.value for token in tokens if token.kind == "word"]
    if dialect == "clickhouse":
        return words[:2] == ["optimize", "table"] and not {"deduplicate", "cleanup"} & set(words)
    if dialect == "postgres":
        return words[:1] == ["analyze"] and "(" not in {token.value for token in tokens if token.kind == "symbol"}
    return False


def _controls_transaction(tokens: Sequence[_Token], dialect: str) -> bool:
    words = [token.value for token in tokens if token.kind == "word"]
    if dialect == "tsql":
        # A statement needs no semicolon before it, and BEGIN alone opens a block.
        return bool({"commit", "rollback", "save", "tran", "transaction"} & set(words))
    return dialect == "postgres" and words[:1] != [] and words[0] in names.TRANSACTION_WORDS
