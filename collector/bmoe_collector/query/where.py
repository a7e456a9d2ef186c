"""The filter language: `cache_mb>=2000 and overlap=1 and not verdict=throttled_entry`.

In: text. Out: a tree, that `holds` evaluates on one run's values and `query.fields` turns into SQL. Grammar:

    expression  := term ("or" term)*
    term        := factor ("and" factor)*
    factor      := "not" factor | "(" expression ")" | comparison
    comparison  := name operator value | name "is" ["not"] "null" | name "in" "(" value ("," value)* ")"
    operator    := "=" | "==" | "!=" | "<" | "<=" | ">" | ">=" | "~" (contains, ASCII letters in any case)
    name        := a run's column, a key of the preamble, a derived fact, label.KEY, or verdict
    value       := number | word | 'text' | "text" | true | false | null

Logic has three values, as in SQL: a comparison with an unmeasured value is neither true nor false, and neither is its
negation. `verdict = CODE` asks whether the run has that verdict.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bmoe_collector.common import UserError

Value = str | float | bool | None

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.:/-]))
      | (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<op><=|>=|!=|<>|==|=|<|>|~)
      | (?P<mark>[(),])
      | (?P<word>[^\s()<>=!~,'"]+)
    )""",
    re.VERBOSE,
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`name operator value`; `is null` has operator "null" and `in` has operator "in" with a tuple."""

    name: str
    op: str
    value: Value | tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The other of what `of` says; unknown stays unknown."""

    of: Tree


@dataclass(frozen=True, slots=True)
class Both:
    """`and` or `or` of several."""

    op: str
    of: tuple[Tree, ...]


Tree = Comparison | Not | Both


def parse(text: str) -> Tree:
    """The tree of an expression.

    Raises:
        UserError: says what was expected and where.
    """
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        self.at = 0
        place = 0
        while place < len(text.rstrip()):
            found = _TOKEN.match(text, place)
            if found is None:
                raise UserError(f"where: cannot read {text[place:].strip()[:20]!r} at position {place + 1} of {text!r}")
            kind = str(found.lastgroup)
            self.tokens.append((kind, found[kind], found.start(kind)))
            place = found.end()

    def whole(self) -> Tree:
        if not self.tokens:
            raise UserError("where: the expression is empty; say for example: cache_mb>=2000 and overlap=1")
        tree = self.either()
        if self.at < len(self.tokens):
            self.fail("`and`, `or` or the end")
        return tree

    def fail(self, wanted: str) -> None:
        if self.at < len(self.tokens):
            _, said, place = self.tokens[self.at]
            raise UserError(f"where: expected {wanted} instead of {said!r} at position {place + 1} of {self.text!r}")
        raise UserError(f"where: expected {wanted} at the end of {self.text!r}")

    def word(self, *wanted: str) -> bool:
        if self.at < len(self.tokens):
            kind, said, _ = self.tokens[self.at]
            if kind in {"word", "mark"} and said.lower() in wanted:
                self.at += 1
                return True
        return False

    def either(self) -> Tree:
        parts = [self.every()]
        while self.word("or"):
            parts.append(self.every())
        return parts[0] if len(parts) == 1 else Both("or", tuple(parts))

    def every(self) -> Tree:
        parts = [self.one()]
        while self.word("and"):
            parts.append(self.one())
        return parts[0] if len(parts) == 1 else Both("and", tuple(parts))

    def one(self) -> Tree:
        if self.word("not"):
            return Not(self.one())
        if self.word("("):
            inner = self.either()
            if not self.word(")"):
                self.fail("`)`")
            return inner
        return self.comparison()

    def comparison(self) -> Tree:
        if self.at >= len(self.tokens) or self.tokens[self.at][0] != "word":
            self.fail("a name")
        name = self.tokens[self.at][1]
        self.at += 1
        if self.word("is"):
            negative = self.word("not")
            if not self.word("null"):
                self.fail("`null`")
            found = Comparison(name, "null", None)
            return Not(found) if negative else found
        if self.word("in"):
            if not self.word("("):
                self.fail("`(`")
            values = [self.value()]
            while self.word(","):
                values.append(self.value())
            if not self.word(")"):
                self.fail("`)`")
            return Comparison(name, "in", tuple(values))
        if self.at >= len(self.tokens) or self.tokens[self.at][0] != "op":
            self.fail("an operator (= != < <= > >= ~), `is` or `in`")
        op = {"==": "=", "<>": "!="}.get(self.tokens[self.at][1], self.tokens[self.at][1])
        self.at += 1
        value = self.value()
        if value is None:
            if op not in {"=", "!="}:
                raise UserError(f"where: {name} {op} null: use `{name} is null`")
            found = Comparison(name, "null", None)
            return found if op == "=" else Not(found)
        return Comparison(name, op, value)

    def value(self) -> Value:
        if self.at >= len(self.tokens) or self.tokens[self.at][0] not in {"number", "text", "word"}:
            self.fail("a value")
        kind, said, _ = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return float(said)
        if kind == "text":
            quote = said[0]
            return said[1:-1].replace(quote * 2, quote)
        return {"true": True, "false": False, "null": None}.get(said.lower(), said)


def names_of(tree: Tree) -> list[str]:
    """Every name an expression asks about, in order, once."""
    if isinstance(tree, Comparison):
        return [tree.name]
    if isinstance(tree, Not):
        return names_of(tree.of)
    return list(dict.fromkeys(name for part in tree.of for name in names_of(part)))


def holds(tree: Tree, get: Callable[[str], Any]) -> bool | None:
    """Whether the expression holds for the values `get` gives by name; None where that is not known.

    For `verdict` and other names with several values `get` returns a set or list, and a comparison asks for any of them.
    """
    if isinstance(tree, Not):
        inner = holds(tree.of, get)
        return None if inner is None else not inner
    if isinstance(tree, Both):
        answers = [holds(part, get) for part in tree.of]
        decisive = tree.op == "or"
        if decisive in answers:
            return decisive
        return None if None in answers else not decisive
    return _compare(get(tree.name), tree)


def _compare(seen: Any, asked: Comparison) -> bool | None:
    if isinstance(seen, set | frozenset | list | tuple):
        if asked.op == "null":
            return not seen
        if asked.op == "!=":
            return all(_compare(one, asked) for one in seen)
        return any(_compare(one, asked) for one in seen)
    if asked.op == "null":
        return seen is None
    if seen is None:
        return None
    if asked.op == "in":
        assert isinstance(asked.value, tuple)
        return any(_compare(seen, Comparison(asked.name, "=", value)) for value in asked.value)
    value = asked.value
    if asked.op == "~":
        return lowered(str(value)) in lowered(str(seen))
    if isinstance(seen, str):
        return _COMPARE[asked.op](seen, as_text(value))
    if isinstance(value, str):
        return None if asked.op not in {"=", "!="} else asked.op == "!="
    return _COMPARE[asked.op](float(seen), float(value))  # type: ignore[arg-type]


def as_text(value: Any) -> str:
    """A value as it is compared with text: whole numbers without a point."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value)


def lowered(text: str) -> str:
    """ASCII letters in lower case, nothing else changed: what both databases can do alike."""
    return "".join(chr(ord(letter) + 32) if "A" <= letter <= "Z" else letter for letter in text)
