"""What every table of the schema is made with: the metadata, types that are the same on both databases, common columns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON as ANY_JSON
from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Integer, MetaData, Text

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Number = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits on both; SQLite numbers rows by itself only when the type is INTEGER."""

JSON = ANY_JSON(none_as_null=True)
"""Nothing is NULL, never the JSON text `null`."""

TYPES: dict[str, Any] = {"int": BigInteger, "float": Double, "str": Text, "bool": Boolean}


def run_no(*, primary: bool = True) -> Column[Any]:
    """The run a row is of; rows go with it."""
    return Column("run_no", Number, ForeignKey("runs.run_no", ondelete="CASCADE"), primary_key=primary, nullable=False)


def at() -> Column[Any]:
    """The place of a row in its source, from 0."""
    return Column("at", Integer, primary_key=True, autoincrement=False)


def typed(columns: dict[str, str], prefix: str = "") -> list[Column[Any]]:
    """Nullable columns of the contract, by SQL name and type word."""
    return [Column(prefix + name, TYPES[kind]) for name, kind in columns.items()]
